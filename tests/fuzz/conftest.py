"""`--fuzz-count`: the number of hostile frames (`make fuzz` uses a million).

The other targets get their share of it (`hostile.targets`). Without the option the number is a
count of examples, of which `make unit` and `make test` use a quarter.
"""

from __future__ import annotations

import pytest

from example_counts import examples

IN_THE_TESTS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=0, help="hostile frames")


@pytest.fixture
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """Return the number of hostile frames."""
    count: int = request.config.getoption("--fuzz-count", default=0)
    return count or examples(IN_THE_TESTS)

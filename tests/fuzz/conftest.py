"""`--fuzz-count`: how many hostile frames are tried (`make fuzz` asks for a million); the other
targets get their share of it (`hostile.targets`). Without it the number is one of examples, of
which `make unit` and `make test` draw a quarter.
"""

from __future__ import annotations

import pytest

from example_counts import examples

IN_THE_TESTS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=0, help="hostile frames")


@pytest.fixture
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """So many hostile frames."""
    count: int = request.config.getoption("--fuzz-count", default=0)
    return count or examples(IN_THE_TESTS)

"""`--fuzz-count`: the number of hostile frames (`make fuzz` uses a million).

`--fuzz-total`: that of all hostile inputs, times the factor of examples (`make slow`: a million).
The other targets get their share of frames (`hostile.targets`). Without the options the number is a
count of examples, of which `make unit` and `make test` use a quarter.
"""

from __future__ import annotations

import pytest

from example_counts import examples
from hostile.targets import frames_for

IN_THE_TESTS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=0, help="hostile frames")
    parser.addoption("--fuzz-total", type=int, default=0, help="hostile inputs of all kinds")


@pytest.fixture(scope="session")
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """Return the number of hostile frames."""
    count: int = request.config.getoption("--fuzz-count", default=0)
    total: int = request.config.getoption("--fuzz-total", default=0)
    return count or (frames_for(examples(total)) if total else examples(IN_THE_TESTS))

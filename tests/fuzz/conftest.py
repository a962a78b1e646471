"""`--fuzz-count`: how many hostile frames are tried (`make fuzz` asks for a million); the other
targets get their share of it (`hostile.targets`).
"""

from __future__ import annotations

import pytest

IN_THE_TESTS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=IN_THE_TESTS, help="hostile frames")


@pytest.fixture
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """So many hostile frames."""
    count: int = request.config.getoption("--fuzz-count", default=IN_THE_TESTS)
    return count

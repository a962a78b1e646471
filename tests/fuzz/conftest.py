"""`--fuzz-count`: how many hostile inputs each fuzz test tries (`make fuzz` asks for a million)."""

from __future__ import annotations

import pytest

IN_THE_TESTS = 20_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=IN_THE_TESTS, help="hostile inputs per test")


@pytest.fixture
def fuzz_count(request: pytest.FixtureRequest) -> int:
    """So many hostile inputs."""
    count: int = request.config.getoption("--fuzz-count", default=IN_THE_TESTS)
    return count

"""Simulated runs share one process, because its start costs as much as six short runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.simulations import one_process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def _process_of_commands() -> Iterator[None]:
    with one_process():
        yield

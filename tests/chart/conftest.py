"""helm for the session, or why there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from chart import Helm, helm_program

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm without a cluster."""
    program: Path | None = helm_program()
    if program is None:
        reason = "no helm command: run `make testbed-setup`, or install helm 3"
        if os.environ.get("DLION_REQUIRE_TESTBED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Helm(program, tmp_path_factory.mktemp("helm"))

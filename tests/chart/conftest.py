"""Programs for the session, or the reason for their absence: helm, kustomize, the judge of GitOps
tools.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import yaml

from chart import Helm, helm_program
from gitops.judge import VERDICTS, Judge
from testbed.binaries import built

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """helm without a cluster."""
    program: Path | None = helm_program()
    if program is None:
        _do_without("no helm command: run `make testbed-setup`, or install helm 3")
    return Helm(program, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def kustomize() -> Callable[..., list[dict[str, Any]]]:
    """The output of `kubectl kustomize FOLDER`; with `anywhere`, files may be outside of it."""
    binaries = built()
    if binaries is None:
        _do_without("no kubectl of the testbed: run `make testbed-setup`")

    def run(folder: Path, *, anywhere: bool = False) -> list[dict[str, Any]]:
        restrictor = "LoadRestrictionsNone" if anywhere else "LoadRestrictionsRootOnly"
        command = [str(binaries.path("kubectl")), "kustomize", str(folder)]
        command += ["--load-restrictor", restrictor]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return list(yaml.load_all(done.stdout, yaml.CSafeLoader))

    return run


@pytest.fixture(scope="session")
def judge() -> Judge:
    """The verdicts of GitOps tools on objects."""
    program = VERDICTS.built()
    if program is None:
        _do_without("the judge of GitOps tools is not built: run `make testbed-setup`")
    return Judge(program)


def _do_without(reason: str) -> NoReturn:
    """Skip; fail if the testbed is required."""
    if os.environ.get("DLION_REQUIRE_TESTBED"):
        pytest.fail(reason)
    pytest.skip(reason)

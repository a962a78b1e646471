"""Test that kubectl runs the installed `kubectl-dlion` as `kubectl dlion`.

Arguments and exit codes pass through. Help and errors name the command as the user typed it. The
test uses kubectl itself without a cluster; test_cli tests the commands there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from testbed.binaries import built

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
SCRIPTS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Kubectl:
    """kubectl, with the scripts of this installation on the PATH and no kubeconfig."""
    binaries = built()
    found = str(binaries.path("kubectl")) if binaries else shutil.which("kubectl")
    if found is None:
        pytest.skip("no kubectl: run `make testbed-setup`, or install it")
    home = tmp_path_factory.mktemp("home")
    environment = {**os.environ, "PATH": f"{SCRIPTS}:/usr/bin:/bin", "HOME": str(home)}
    environment |= {"KUBECONFIG": str(home / "none")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [found, *words], env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_the_plugin_is_listed(kubectl: Kubectl) -> None:
    done = kubectl("plugin", "list")
    assert str(SCRIPTS / "kubectl-dlion") in done.stdout.split()


def test_the_plugin_is_the_same_command(kubectl: Kubectl) -> None:
    done = kubectl("dlion", "--version")
    alone = subprocess.run(
        [SCRIPTS / "dlion", "--version"], capture_output=True, text=True, check=True
    )
    assert (done.returncode, done.stdout) == (0, alone.stdout)


def test_help_names_the_command_as_typed(kubectl: Kubectl) -> None:
    assert "Usage: kubectl dlion [OPTIONS] COMMAND" in kubectl("dlion", "--help").stdout
    done = kubectl("dlion", "get", "--help")
    assert done.returncode == 0
    assert "Usage: kubectl dlion get [OPTIONS]" in done.stdout


def test_exit_codes_pass_through(kubectl: Kubectl, tmp_path: Path) -> None:
    wrong = tmp_path / "job.yaml"
    wrong.write_text("kind: DLionJob")
    assert kubectl("dlion", "validate", str(wrong)).returncode == ExitCode.SPEC
    done = kubectl("dlion", "no-such-command")
    assert done.returncode == ExitCode.USAGE
    assert "kubectl dlion --help" in done.stderr

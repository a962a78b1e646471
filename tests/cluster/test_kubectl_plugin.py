"""Facts: kubectl finds the installed `kubectl-dlion` and runs it as `kubectl dlion`, with its
arguments and exit code; help and refusals are in the words that the user typed.

kubectl itself, and no cluster: what the commands do there stands in test_cli.
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


def test_it_is_found_among_the_plugins(kubectl: Kubectl) -> None:
    done = kubectl("plugin", "list")
    assert str(SCRIPTS / "kubectl-dlion") in done.stdout.split()


def test_it_is_the_same_command(kubectl: Kubectl) -> None:
    done = kubectl("dlion", "--version")
    alone = subprocess.run(
        [SCRIPTS / "dlion", "--version"], capture_output=True, text=True, check=True
    )
    assert (done.returncode, done.stdout) == (0, alone.stdout)


def test_help_names_it_as_it_was_typed(kubectl: Kubectl) -> None:
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

"""Test that the operator ends in order at a SIGTERM soon after its start, and if it cannot start.

The signal arrives when Python has just started, and during imports. Processes are real and start as
in the image. Left out: that process 1 of a container gets a deferred signal
(tests/local/test_pods.py), a running operator (tests/cluster).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlion_api.cluster_names import BLOCK_SIGTERM_COMMAND
from dlion_api.exit_codes import ExitCode

WITHIN_S = 30.0
CONFIG = "{site: plant-a, images: {worker: w, sidecar: s}, coordinator: {address: here:1}}"


def has_begun(process: Path) -> bool:
    """Report whether `env` has become Python."""
    return (process / "exe").readlink().name.startswith("python")


def imports(process: Path) -> bool:
    """Report whether aiohttp's native code is loaded: kopf is being imported."""
    return "aiohttp" in (process / "maps").read_text()


@pytest.mark.parametrize(("moment", "times"), [(has_begun, 20), (imports, 2)])
def test_an_operator_ends_at_an_early_signal(
    tmp_path: Path, moment: Callable[[Path], bool], times: int
) -> None:
    """Without its settings it would exit anyway, but not with this code."""
    config = str(tmp_path / "none.yaml")
    command = [*BLOCK_SIGTERM_COMMAND, sys.executable, "-m", "dlion_operator", "--config", config]
    for _ in range(times):
        with subprocess.Popen(command, stderr=subprocess.PIPE) as operator:
            deadline_s = time.monotonic() + WITHIN_S
            while not moment(Path(f"/proc/{operator.pid}")):  # no pause: the moment is short
                assert time.monotonic() < deadline_s
            operator.send_signal(signal.SIGTERM)
            assert operator.wait(WITHIN_S) == ExitCode.OK


USERS = """
current-context: a
contexts: [{name: a, context: {cluster: a, user: a}}]
clusters: [{name: a, cluster: {server: "https://127.0.0.1:1"}}]
users: [1]
"""


@pytest.mark.parametrize(
    ("kubeconfig", "code", "message"),
    [
        (None, ExitCode.UNAVAILABLE, "no cluster: this process runs in no pod"),
        *(
            (text, ExitCode.UNAVAILABLE, "kubeconfig: cannot be used: ")
            for text in (
                "apiVersion: v1",
                "clusters: [",
                "[]",
                "[" * 3000,
                USERS,
                "current-context: a\nclusters: 3",
                USERS.replace("[1]", "[{name: a, user: {client-key-data: abc}}]"),
            )
        ),
    ],
)
def test_an_operator_that_cannot_start_ends_with_the_reason(
    tmp_path: Path, kubeconfig: str | None, code: ExitCode, message: str
) -> None:
    config, file = tmp_path / "config.yaml", tmp_path / "kubeconfig"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "dlion_operator", "--config", str(config)]
    if kubeconfig is not None:
        file.write_text(kubeconfig)
        command += ["--kubeconfig", str(file)]
    done = start_failed(command)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert ("Give --kubeconfig FILE" in done.stderr) == (kubeconfig is None)


def test_a_pod_without_a_token_is_named_as_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "dlion_operator", "--config", str(config)]
    done = start_failed(command, KUBERNETES_SERVICE_HOST="127.0.0.1", KUBERNETES_SERVICE_PORT="443")
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert "Service token file does not exist. Set automountServiceAccountToken" in done.stderr
    assert "--kubeconfig" not in done.stderr


def start_failed(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an operator that cannot start, outside of a pod unless these variables say otherwise."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")} | variables
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=4 * WITHIN_S, check=False
    )

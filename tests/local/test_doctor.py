"""Test `dlion doctor` on this machine.

It finds no fault here, with real TensorFlow and the kernels. With a dead API server, an unusable
folder for temporary files or a credential plugin that never ends, it reports each fault. It does
all other checks and exits with 69 within 30 s. Ctrl-C ends it at once. Without the extras it lists
what is missing.

Left out: each fault of a cluster (tests/unit/cli/test_doctor_cluster.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from attempts import first_that_holds

pytestmark = pytest.mark.patient

NAP_S = f"60.{os.getpid()}"
"""Seconds that identify a process of the test."""
COMMAND = [sys.executable, "-m", "dlion_cli", "doctor"]


def doctor(*options: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code, and the checks by name."""
    done = subprocess.run(
        [*COMMAND, "-o", "json", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return done.returncode, {each["check"]: each for each in json.loads(done.stdout)["checks"]}


def doctor_within(within_s: float, *options: str, **environment: str) -> tuple[int, dict[str, Any]]:
    """Return the result of `doctor` from the first of several runs within the time."""

    def timed() -> tuple[float, int, dict[str, Any]]:
        began_s = time.monotonic()
        code, found = doctor(*options, **environment)
        return time.monotonic() - began_s, code, found

    _, code, found = first_that_holds(timed, lambda ran: ran[0] < within_s, attempts=3)
    return code, found


def kubeconfig(folder: Path, user: dict[str, Any]) -> str:
    path = folder / "kubeconfig"
    document = {
        "current-context": "here",
        "clusters": [{"name": "here", "cluster": {"server": "https://127.0.0.1:9"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "jane"}}],
        "users": [{"name": "jane", "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return str(path)


@pytest.mark.timeout(120)
def test_no_fault_is_found_on_this_machine(tmp_path: Path) -> None:
    code, found = doctor(KUBECONFIG=str(tmp_path / "absent"), KUBERNETES_SERVICE_HOST="")
    failed = {name: each for name, each in found.items() if each["outcome"] == "failed"}
    assert (code, failed) == (0, {})
    assert {each["where"] for each in found.values()} == {"machine"}
    assert found["kernels"]["outcome"] in ("ok", "warning")
    assert found["tensorflow"]["outcome"] in ("ok", "warning")


@pytest.mark.timeout(200)
def test_all_checks_run_in_bounded_time_despite_faults(tmp_path: Path) -> None:
    config = kubeconfig(tmp_path, {"token": "x"})
    options = ["--kubeconfig", config, "-n", "ml", "--timeout", "20"]
    code, found = doctor_within(30.0, *options, TMPDIR=str(tmp_path / "absent"))
    assert code == 69
    assert "nothing listens there" in found["api server"]["observed"]
    assert found["nodes"]["outcome"] == "unknown"
    assert found["temporary files"]["outcome"] == "failed"
    assert found["temporary files"]["observed"].startswith(str(tmp_path / "absent"))
    assert found["loopback"]["outcome"] == "ok"


@pytest.mark.timeout(200)
def test_a_plugin_that_never_ends_is_reported_in_time(tmp_path: Path) -> None:
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1", "command": "sleep", "args": [NAP_S],
        "interactiveMode": "Never",
    }  # fmt: skip
    config = kubeconfig(tmp_path, {"exec": plugin})
    code, found = doctor_within(20.0, "--kubeconfig", config, "--timeout", "8")
    assert code == 69
    assert found["kubeconfig"]["outcome"] == "failed"
    assert "credential plugin" in found["kubeconfig"]["advice"]
    assert found["loopback"]["outcome"] == "ok"
    assert f"sleep\0{NAP_S}\0" not in texts("[0-9]*/cmdline"), "no process is left"


def texts(pattern: str) -> list[str]:
    """Return what these files of /proc hold, without those of processes that end meanwhile."""
    found = []
    for path in Path("/proc").glob(pattern):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return found


def children(pid: int) -> list[int]:
    """Return the children of all its threads."""
    return [int(child) for text in texts(f"{pid}/task/*/children") for child in text.split()]


@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_command_and_its_children(tmp_path: Path) -> None:
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "absent")}
    with subprocess.Popen(COMMAND, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (started := children(process.pid)):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)  # to this process only, as `kill` does
        _, error = process.communicate(timeout=30)
    assert (process.returncode, "interrupted" in error) == (130, True)
    end_s = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < end_s, "an interpreter still runs"
        time.sleep(0.05)


@pytest.mark.timeout(60)
def test_missing_extras_are_listed(tmp_path: Path) -> None:
    """Imports of the extras' packages fail, as in an installation without them."""
    code = (
        "import sys\n"
        "for name in ('numpy', 'tensorflow', 'keras', 'numba', 'grpc', 'kubernetes', 'urllib3',\n"
        "             'websocket', 'matplotlib', 'networkx', 'cryptography'):\n"
        "    sys.modules[name] = None\n"
        "from dlion_cli.__main__ import main\n"
        "sys.exit(main(['doctor', '-o', 'json', '--kubeconfig', sys.argv[1], '--timeout', '20']))"
    )
    config = kubeconfig(tmp_path, {"token": "x"})
    done = subprocess.run(
        [sys.executable, "-c", code, config], capture_output=True, text=True, timeout=60
    )
    assert done.stdout, done.stderr
    found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    assert done.returncode == 69
    assert "the extra is not installed" in found["kubeconfig"]["observed"]
    assert "[cluster]" in found["kubeconfig"]["advice"]
    assert found["memory"]["outcome"] in ("ok", "warning")

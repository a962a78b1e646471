"""Test the installation of the command line from the wheels of a bundle.

The network namespace has no interface up. pip installs the command line with its extra `cluster`
into an empty environment of Python 3.11. There `dlion --help` runs, `dlion validate` accepts the
main example and rejects a wrong one, and the commands for clusters find their packages.
`collect_wheels` fetches the wheels with the lock's hashes, for 64-bit ARM, too.

Left out: the wheel's training (test_installed_wheel.py), the rest of a bundle
(tests/cluster/test_bundle.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundle.image_builders import own_platform
from bundle.parts import collect_wheels

ROOT = Path(__file__).parents[2]
ALONE = ("unshare", "--net", "--")
OUTSIDE = """
import socket
names = [name for _, name in socket.if_nameindex()]
try:
    socket.create_connection(("192.0.2.1", 443), timeout=5)
except OSError as error:
    print(names, error.strerror)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace: run as root"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the wheels are for Python 3.11"),
]


def test_the_command_line_is_installed_and_runs_without_any_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wheels := tmp_path / "wheels").mkdir()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    collect_wheels(wheels, own_platform(), tmp_path)
    assert not [path for path in wheels.iterdir() if path.suffix != ".whl"]
    # Exclude this machine's pip settings and packages.
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "VIRTUAL_"))
    }
    clean |= {"PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path)}
    (folder := tmp_path / "elsewhere").mkdir()

    def run(*command: str | Path, code: int = 0) -> str:
        done = subprocess.run(
            [*ALONE, *map(str, command)],
            cwd=folder, env=clean, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "['lo'] Network is unreachable" in run(sys.executable, "-c", OUTSIDE)
    run(sys.executable, "-m", "venv", tmp_path / "installed")
    programs = tmp_path / "installed" / "bin"
    run(programs / "pip", "install", "--no-index", "--find-links", wheels, "dlion[cluster]")
    listed = run(programs / "pip", "list", "--format=freeze")
    assert "kubernetes==" in listed
    assert "tensorflow" not in listed
    run(programs / "pip", "check")
    assert "validate" in run(programs / "dlion", "--help")
    run(programs / "dlion", "validate", ROOT / "examples/digits.yaml")
    (folder / "wrong.yaml").write_text("kind: DLionJob\n")
    assert "apiVersion" in run(programs / "dlion", "validate", "wrong.yaml", code=65)
    (folder / "config").write_text(
        "{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: http://192.0.2.1}}],"
        " contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u, user: {}}],"
        " current-context: c}"
    )
    unreached = run(programs / "kubectl-dlion", "get", "--kubeconfig", "config", code=69)
    assert "192.0.2.1" in unreached


def test_the_wheels_of_a_bundle_for_arm_are_complete(tmp_path: Path) -> None:
    """They have the same names and versions; the test does not run them."""
    found = {}
    for platform in ("linux/amd64", "linux/arm64"):
        (wheels := tmp_path / platform.replace("/", "-")).mkdir()
        (scratch := tmp_path / f"scratch-{wheels.name}").mkdir()
        collect_wheels(wheels, platform, scratch)
        found[platform] = sorted(path.name for path in wheels.iterdir())
    own, arm = found["linux/amd64"], found["linux/arm64"]
    assert [name.split("-")[:2] for name in own] == [name.split("-")[:2] for name in arm]
    assert any("aarch64" in name for name in arm)
    assert not any("x86_64" in name for name in arm)

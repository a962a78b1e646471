"""Test `tools/test-all` with a small tree of tests: what it runs, repeats and prints."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PASSES = "def test_passes():\n    pass\n"
TIMES_TRIED = """
import pathlib
import pytest

def test_counts():
    tries = pathlib.Path(__file__).with_suffix(".tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) > {fails}
"""
SHAKY = (
    "cluster/test_shaky", "cluster/test_podless", "cluster/test_apart",
    "local/test_shaky", "local/test_slowly",
)  # fmt: skip
PODLESS = "import pytest\npytestmark = pytest.mark.podless\n"
OWN_SITES = "import pytest\npytestmark = pytest.mark.own_sites\n"
COPIED = (
    "tools/test-all",
    "tools/test-streams",
    "pyproject.toml",
    "tests/conftest.py",
    "tests/support/example_counts.py",
    "tests/support/process_starter.py",
    "tests/support/time_budgets.py",
    "tests/time_budgets.toml",
)
PLUGINS = ("xdist", "xdist.looponfail", "pytest_rerunfailures", "pytest_timeout")
"""Plugins are named, as sessions that search for them start in twice the time."""
PATIENT = "import pytest\npytestmark = pytest.mark.patient\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the real script, configuration and conftest, and one test for each tier.

    One of its sessions has processes for its tests: each costs as much as a session.
    """
    for folder in (
        "unit",
        "property",
        "contract",
        "fuzz",
        "simulated",
        "chart",
        "cluster",
        "local",
    ):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests" / "support").mkdir()
    for file in COPIED:
        shutil.copy(REPOSITORY / file, tmp_path / file)
    pytest_of_the_tree = tmp_path / ".venv" / "bin" / "pytest"
    pytest_of_the_tree.parent.mkdir(parents=True)
    plugins = " ".join(f"-p {plugin}" for plugin in PLUGINS)
    pytest_of_the_tree.write_text(
        "#!/bin/sh\nexport PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\n"
        'case "$*" in *"-m podless and"*) ;; *) in_one_process="-n 0" ;; esac\n'
        f'exec {sys.executable} -m pytest {plugins} "$@" $in_one_process\n'
    )
    pytest_of_the_tree.chmod(0o755)
    for tier in ("unit", "cluster", "local"):
        (tmp_path / "tests" / tier / f"test_{tier}.py").write_text(PASSES)
    (tmp_path / "tests" / "cluster" / "test_alone.py").write_text(PODLESS + PASSES)
    (tmp_path / "tests" / "cluster" / "test_sites.py").write_text(OWN_SITES + PASSES)
    (tmp_path / "tests" / "local" / "test_patient.py").write_text(PATIENT + PASSES)
    return tmp_path


def failing(times: int) -> str:
    """Return a test that fails this many times before it passes."""
    return TIMES_TRIED.format(fails=times)


def tried(tree: Path, test: str) -> int:
    return len((tree / "tests" / f"{test}.tries").read_text())


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "tools" / "test-all"], cwd=tree, capture_output=True, text=True)


def test_passing_tests_run_once_and_end_with_0(tree: Path) -> None:
    """The result of every tier is shown, also of those that ran in parallel."""
    ended = run(tree)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(re.findall(r"\b1 passed", ended.stdout)) == 6
    assert "by itself" not in ended.stdout
    assert ended.stderr == ""


def test_failed_cluster_tests_run_alone_and_local_tests_run_once(tree: Path) -> None:
    """Twice in its session, once in its own session, and once with a new cluster; then it
    counts.
    """
    (tree / "tests/cluster/test_shaky.py").write_text(failing(2))
    (tree / "tests/cluster/test_podless.py").write_text(PODLESS + failing(2))
    (tree / "tests/cluster/test_apart.py").write_text(OWN_SITES + failing(2))
    (tree / "tests/local/test_shaky.py").write_text(failing(1))
    (tree / "tests/local/test_slowly.py").write_text(PATIENT + failing(1))
    ended = run(tree)
    assert ended.returncode == 1
    assert [tried(tree, test) for test in SHAKY] == [3, 3, 3, 1, 1]
    assert ended.stdout.count("test-all: failed tests, alone") == 3
    assert "clusters 0, sites 0, podless 0, local 1, patient 1" in ended.stderr
    assert "DEFECT: failed and was run again: tests/cluster/test_podless.py" in ended.stdout


def test_a_failed_fast_test_is_not_repeated(tree: Path) -> None:
    """Its failure ends the whole run: nothing slower starts."""
    (tree / "tests/unit/test_shaky.py").write_text(failing(1))
    ended = run(tree)
    assert ended.returncode == 1
    assert "the fast tests ended with exit code 1; the others did not run" in ended.stderr
    assert ended.stdout.count("test session starts") == 1
    assert tried(tree, "unit/test_shaky") == 1


STAND_IN = """#!/bin/bash
case "$*" in *tests/unit*) exit 0 ;; esac
trap 'exit 2' INT
mktemp "$TMPDIR/began-XXXX"
sleep 100
"""
"""As pytest, which catches an interrupt and ends with 2. Fast tests have passed."""


def test_an_interrupt_ends_all_streams_and_leaves_no_process(tree: Path, tmp_path: Path) -> None:
    """pytest catches it, so that a shell would continue."""
    (tree / ".venv/bin/pytest").write_text(STAND_IN)
    (temporary := tmp_path / "temporary").mkdir()
    running = subprocess.Popen(
        [tree / "tools" / "test-all"],
        cwd=tree,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 60
    while (
        len(list(temporary.glob("began-*"))) < 3
    ):  # the fourth stream waits for the end of another
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    output, _ = running.communicate(timeout=60)  # until the last of them has closed it
    assert running.returncode == 130, output
    assert [path for path in temporary.iterdir() if not path.name.startswith("began-")] == []

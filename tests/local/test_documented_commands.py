"""Test the commands of the tutorial and of README.md.

Every command of the tutorial that needs no cluster runs in the order of the page, in a folder with
only the examples. The results match the claims of the page. Each shell command of README.md and of
the tutorial runs here or is of a kind listed below. So does each command of README.md's table.

Left out: commands for clusters (tests/cluster), and `make setup` and `make test`, which run this.
The first example trains for less than its minute. `make quickstart` is slow.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.patient

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
HERE_DOCUMENT = re.compile(r"<<'(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)
LEFT_OUT = re.compile(
    r"make (setup|test|quickstart)\b|\. \.venv/bin/activate|helm |kubectl "
    r"|dlion (submit|get|describe|events|top|wait|scale|watch|logs|fetch)\b"
    r"|dlion (suspend|resume|delete|trust|preflight)\b"
)
READ_ONLY = "dlion ls\ndlion logs runs/mine\n"
"""Commands of README.md's table that the tutorial lacks."""
RUN_ELSEWHERE = {
    "calibrate": "local/test_calibrate.py",
    "describe": "cluster/test_cli.py",
    "doctor": "local/test_doctor.py",
    "fetch": "cluster/test_cli.py",
    "replay": "local/test_replay.py",
    "submit": "cluster/test_cli.py",
    "top": "cluster/test_cli.py",
}
"""Commands of README.md that need a cluster, or a minute, with the test that runs them."""


def commands(block: str) -> list[str]:
    """Return the command lines of a block, without the input that a command reads."""
    lines = HERE_DOCUMENT.sub("", block).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def runnable_blocks(page: Path) -> list[str]:
    """Return the blocks to run. Raise AssertionError for a block that can run only in part."""
    chosen = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        left_out = [LEFT_OUT.match(command) is not None for command in commands(block)]
        assert all(left_out) or not any(left_out), f"{page.name}: split this block:\n{block}"
        if not all(left_out):
            chosen.append(block)
    return chosen


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Create a folder with the files that the commands use; the first example trains for 4 s."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "Makefile", tmp_path)
    digits = tmp_path / "examples" / "digits.yaml"
    text, count = re.subn(r"maxSeconds: \d+", "maxSeconds: 4", digits.read_text())
    assert count == 1, "the example ends by maxSeconds"
    digits.write_text(text)
    return tmp_path


def shell(text: str, folder: Path) -> str:
    """Run these lines in a shell that stops at the first failure, and return the output."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def document(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.timeout(300)
def test_the_tutorial_runs_from_top_to_bottom(clone: Path) -> None:
    blocks = runnable_blocks(ROOT / "docs" / "tutorial.md")
    assert len(blocks) >= 6, "the page has blocks marked as shell"
    output = "".join(shell(block, clone) for block in (*blocks, READ_ONLY))
    runs = clone / "runs"
    assert re.search(r"^\s*slow-links +simulate +succeeded", output, re.MULTILINE)
    assert (runs / "digits" / "report.html").is_file()
    assert "mine/job.yaml: DLionJob default/own-model#1 is valid, its program trains" in output
    for name in ("mine", "slow-links"):
        ending = document(runs / name / "summary.json")["ending"]
        assert ending["succeeded"], ending
        assert ending["stop_reason"].startswith("targetAccuracy 0.97 reached"), ending
    rows = document(runs / "compared" / "comparison.json")["rows"]
    sent = {row["variant"]: row["bytes_to_target"]["median"] for row in rows}
    # Each step of one seed depends on how the processor's vector instructions round.
    assert 4 < sent["full"] / sent["adaptive"] < 11, "the page states five to eight times"
    seconds = {row["variant"]: row["time_to_target_s"]["median"] for row in rows}
    assert 0.5 < seconds["full"] / seconds["adaptive"] < 2.0, "the page states a similar time"
    alone = document(runs / "alone" / "summary.json")
    accuracies = [each["accuracy"]["best"] for each in alone["workers"]]
    assert max(accuracies) < 0.55, "the page states about half"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_shell_command_runs_or_is_excluded(page: Path) -> None:
    assert BLOCK.findall(page.read_text(encoding="utf-8"))
    if page.stem == "README":
        assert runnable_blocks(page) == []  # otherwise run them here, too
    else:
        assert runnable_blocks(page)


def test_each_command_of_the_readme_runs_in_a_test() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    table = text.partition("| command | what it does |")[2].partition("\n\n")[0]
    spans = [span for row in table.splitlines()[2:] for span in CODE.findall(row.split(" | ")[0])]
    lines = [line for block in BLOCK.findall(text) for line in commands(block)]
    named = {span.removeprefix("dlion ").split()[0] for span in spans}
    named |= {line.split()[1] for line in lines if line.startswith("dlion ")}
    run = "\n".join([*runnable_blocks(PAGES[1]), READ_ONLY])
    here = {name for name in named if re.search(rf"^dlion {name}\b", run, re.MULTILINE)}
    assert len(here) >= 8
    assert named - here == set(RUN_ELSEWHERE)
    for name, test in RUN_ELSEWHERE.items():
        assert f'"{name}"' in (ROOT / "tests" / test).read_text(encoding="utf-8"), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quick_start_trains_twice_and_compares(clone: Path) -> None:
    (clone / ".venv").symlink_to(sys.prefix)
    shell("make --old-file=.venv/.ready quickstart", clone)
    (out,) = (clone / "runs").glob("quickstart-*")
    assert (out / "report.html").is_file()
    trained, alone = (
        document(out / name / "summary.json")["accuracy"]["mean"] for name in ("adaptive", "none")
    )
    assert trained > 0.8 > 0.6 > alone, "each site alone has half of the classes"

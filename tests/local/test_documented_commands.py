"""Facts: every command of the tutorial that needs no cluster runs as the page has it, one after the
other, in a folder with nothing but the examples, and leads to what the page claims. Each shell
command of README.md and of the tutorial is run here or is of a kind that is left out below.

Left out: commands for clusters (tests/cluster) and `make setup` and `make test`, which run this.
The minute of the first example is shortened. `make quickstart` is slow.
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
HERE_DOCUMENT = re.compile(r"<<'(\w+)'\n.*?^\1$", re.MULTILINE | re.DOTALL)
LEFT_OUT = re.compile(
    r"make (setup|test|quickstart)\b|\. \.venv/bin/activate|helm |kubectl "
    r"|dlion (submit|get|describe|events|top|wait|scale|watch|logs|fetch)\b"
    r"|dlion (suspend|resume|delete|trust|preflight)\b"
)


def commands(block: str) -> list[str]:
    """The command lines of a block, without the text that a command reads."""
    lines = HERE_DOCUMENT.sub("", block).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def runnable_blocks(page: Path) -> list[str]:
    """Blocks to run. Raises: AssertionError for a block of which only a part can be run."""
    chosen = []
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        left_out = [LEFT_OUT.match(command) is not None for command in commands(block)]
        assert all(left_out) or not any(left_out), f"{page.name}: split this block:\n{block}"
        if not all(left_out):
            chosen.append(block)
    return chosen


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the commands use of a clone; the first example trains for 4 s."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "Makefile", tmp_path)
    digits = tmp_path / "examples" / "digits.yaml"
    text, count = re.subn(r"maxSeconds: \d+", "maxSeconds: 4", digits.read_text())
    assert count == 1, "the example still ends by maxSeconds"
    digits.write_text(text)
    return tmp_path


def shell(text: str, folder: Path) -> str:
    """Output of these lines in a shell that stops at the first failure."""
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
    assert len(blocks) >= 6, "its blocks are still marked as shell"
    output = "".join(shell(block, clone) for block in blocks)
    runs = clone / "runs"
    assert (runs / "digits" / "report.html").is_file()
    assert "mine/job.yaml: DLionJob default/own-model#1 is valid, its program trains" in output
    for name in ("mine", "slow-links"):
        ending = document(runs / name / "summary.json")["ending"]
        assert ending["succeeded"], ending
        assert ending["stop_reason"].startswith("targetAccuracy 0.97 reached"), ending
    rows = document(runs / "compared" / "comparison.json")["rows"]
    sent = {row["variant"]: row["bytes_to_target"]["median"] for row in rows}
    assert 5 < sent["full"] / sent["adaptive"] < 11, "the page has eight times"
    seconds = {row["variant"]: row["time_to_target_s"]["median"] for row in rows}
    assert 0.9 < seconds["full"] / seconds["adaptive"] < 1.4, "the page has 1.1 times"
    alone = document(runs / "alone" / "summary.json")
    accuracies = [each["accuracy"]["best"] for each in alone["workers"]]
    assert max(accuracies) < 0.55, "the page has about half"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_shell_command_is_run_or_left_out_for_a_reason(page: Path) -> None:
    assert BLOCK.findall(page.read_text(encoding="utf-8"))
    if page.stem == "README":
        assert runnable_blocks(page) == []  # else run them here, too
    else:
        assert runnable_blocks(page)


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
    assert trained > 0.8 > 0.6 > alone, "each site alone knows half of the classes"

"""docs/writing-a-policy.md to the letter: its package is made from the page, installed, simulated.

Left out: `dlion compare` of the page (tests/simulated/test_simulation).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "writing-a-policy.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found is not None, language
    return found[1]


def commands() -> list[str]:
    return block("sh").replace("\\\n", " ").strip().splitlines()


def installed(tmp_path: Path, source: str) -> Path:
    """Where the page's package is installed, with that source."""
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (package / "pyproject.toml").write_text(block("toml"))
    (package / "lottery_policy.py").write_text(source)
    assert commands()[0] == "pip install --no-deps ."
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    subprocess.run(
        [*uv, "--no-build-isolation", "--python", sys.executable, "--target", str(site), "."],
        cwd=package, check=True,
    )  # fmt: skip
    return site


def test_the_page_leads_to_a_policy_that_trains(tmp_path: Path) -> None:
    site = installed(tmp_path, block("python"))
    simulate = commands()[1].split()
    assert simulate[:2] == ["dlion", "simulate"]
    done = subprocess.run(
        [sys.executable, "-m", "dlion_cli", *simulate[1:], "--out", str(tmp_path / "out"),
         "--no-report", "-o", "json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["accuracy"]["mean"] > 0.8
    assert (tmp_path / "out" / "job.yaml").read_text().count("lottery") == 1


def test_what_peers_refuse_of_a_policy_names_it_and_why(tmp_path: Path) -> None:
    source = block("python").replace("(peers, coded.payload)", '(peers, b"four")')
    site = installed(tmp_path, source)
    done = subprocess.run(
        [sys.executable, "-m", "dlion_cli", *commands()[1].split()[1:], "--no-report",
         "--out", str(tmp_path / "out")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 67, done.stderr
    said = " ".join(done.stderr.split())
    assert "policy lottery (lottery_policy:POLICY): worker 1, at iteration 1, refuses" in said
    assert "a message of worker 0: payload of 4 bytes; allowed: at least the header's" in said


def test_without_the_package_the_error_names_what_there_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlion_cli", *commands()[1].split()[1:]],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 65
    assert "lottery" in done.stderr
    assert "dgc, dlion" in done.stderr

"""Tests of docs/writing-a-policy.md: its package is made from the page, installed and simulated.

A second package with a faulty policy is installed beside it.

Left out: `dlion compare` of the page (tests/simulated/test_simulation); all but the first of the
400 s that the page simulates.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.simulations import EndedCommand, one_process, run_commands

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "writing-a-policy.md").read_text()
SECONDS, ACCURACY = 100, 0.7
"""Long enough to distinguish a policy that trains from one that does not."""


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found is not None, language
    return found[1]


def commands() -> list[str]:
    return block("sh").replace("\\\n", " ").strip().splitlines()


def simulating(out: Path, policy: str = "lottery") -> list[str]:
    """The page's command for that policy."""
    dlion, *words = commands()[1].replace("lottery", policy).split()
    assert (dlion, words[0]) == ("dlion", "simulate")
    words[1] = str(ROOT / words[1])
    stop = f"trainer.stop.maxSeconds={SECONDS}"
    return [*words, "--set", stop, "--out", str(out), "--no-report", "-o", "json"]


def installed(folder: Path, source: str, policy: str = "lottery") -> Path:
    """Install the page's package, with that source and its policy of that name;
    return its place.
    """
    package, site = folder / f"{policy}-package", folder / f"{policy}-site"
    package.mkdir()
    (package / "pyproject.toml").write_text(block("toml").replace("lottery", policy))
    (package / f"{policy}_policy.py").write_text(source)
    assert commands()[0] == "pip install --no-deps ."
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--offline", "--no-deps"]
    subprocess.run(
        [*uv, "--no-build-isolation", "--python", sys.executable, "--target", str(site), "."],
        cwd=package, check=True,
    )  # fmt: skip
    return site


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EndedCommand]:
    """The page's command with its package, and with the faulty one."""
    folder = tmp_path_factory.mktemp("policies")
    source = block("python")
    wrong = source.replace("(peers, coded.payload)", '(peers, b"four")')
    assert wrong != source
    sites = [installed(folder, source), installed(folder, wrong, "wrong")]
    path = ":".join([*map(str, sites), os.environ.get("PYTHONPATH", "")])
    with one_process({**os.environ, "PYTHONPATH": path}):
        policies = ("lottery", "wrong")
        return run_commands(
            folder, {name: simulating(folder / name / "out", name) for name in policies}
        )


def test_the_page_leads_to_a_policy_that_trains(ended: dict[str, EndedCommand]) -> None:
    assert ended["lottery"].exit_code == 0, ended["lottery"].stderr
    summary = json.loads(ended["lottery"].stdout)
    print(f"accuracy {summary['accuracy']['mean']:.3f} after {SECONDS} s")
    assert summary["accuracy"]["mean"] > ACCURACY


def test_the_refusal_of_a_policys_message_names_the_policy_and_the_reason(
    ended: dict[str, EndedCommand],
) -> None:
    assert ended["wrong"].exit_code == 67, ended["wrong"].stderr
    message = " ".join(ended["wrong"].stderr.split())
    assert "policy wrong (wrong_policy:POLICY): worker 1, at iteration 1, refuses" in message
    assert "a message of worker 0: payload of 4 bytes; allowed: at least the header's" in message


def test_without_the_package_the_error_names_the_known_policies(tmp_path: Path) -> None:
    (done,) = run_commands(tmp_path, {"none": simulating(tmp_path / "out")}).values()
    assert done.exit_code == 65
    assert "lottery" in done.stderr
    assert "dgc, dlion" in done.stderr

"""Tests of attacks by one of four workers with its own valid identity, in virtual time.

Clean runs name and quarantine no worker, with like and with skewed data. With `quarantine` an
attacker is quarantined, and the others learn. A hundredfold contribution destroys the model or
training. Its sender is named before, and with `clip` the model learns. Flipped signs, flipped
labels, a constant contribution or a small constant part are named, and no honest worker is. A
worker that sends the opposite of an honest worker's values cannot get that one named. With like
data `krum` learns beside a threefold sign flip.

Left out: the whole table (benchmarks/insiders.py); attacks that are not found (docs/robustness.md);
each bound (tests/unit/core/policies/test_deviations.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "support" / "insider_runs.py"
ATTACKER = "1"
CASES = {
    "clean": ("none", "iid", "detect", "majority"),
    "clean, skewed": ("none", "bySite", "detect", "majority"),
    "x100": ("x100", "iid", "detect"),
    "x100, clip": ("x100", "iid", "clip"),
    "label flip": ("label flip", "bySite", "detect"),
    "constant": ("constant", "iid", "detect"),
    "frame a peer": ("frame a peer", "bySite", "detect"),
    "sign flip x3, krum": ("sign flip x3", "iid", "krum"),
    "sign flip, quarantine": ("sign flip", "bySite", "clip", "majority"),
    "replay, quarantine": ("replay", "iid", "clip", "majority"),
    "sign flip x3, quarantine": ("sign flip x3", "bySite", "clip", "majority"),
    "little is enough, quarantine": ("little is enough", "bySite", "clip", "majority"),
    "little, both signs, quarantine": ("little, both signs", "bySite", "clip", "majority"),
    "slow drip": ("slow drip", "bySite", "detect"),
}
STEPS = 60
STEPS_OF = {"label flip": 40, "frame a peer": 40, "slow drip": 80}
"""Length of jobs whose accuracy is not checked."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All runs, in one process that is not the test's."""
    out = tmp_path_factory.mktemp("insiders") / "runs.jsonl"
    fields = ("attack", "split", "robustness")
    lines = [
        json.dumps(
            {
                **dict(zip(fields, case[:3], strict=True)),
                "settings": {
                    "trainer.program": {"file": "dense.py"},
                    "exchange.quarantine": "".join(case[3:]) or "off",
                },
                "policy": "adaptive",
                "seed": 1,
                "steps": STEPS_OF.get(name, STEPS),
            }
        )
        for name, case in CASES.items()
    ]
    done = subprocess.run(
        [sys.executable, PROGRAM, out], input="\n".join(lines), capture_output=True, text=True,
        check=False, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = map(json.loads, out.read_text().splitlines())
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", ["clean", "clean, skewed"])
def test_a_clean_run_names_no_worker_and_learns(runs: dict[str, dict[str, Any]], name: str) -> None:
    assert (runs[name]["named"], runs[name]["quarantined"]) == ({}, [])
    assert runs[name]["accuracy"] > 0.85


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x100", "contributes values with the norm"),
        ("x100, clip", "contributes values with the norm"),
        ("label flip", "contributes values that oppose"),
        ("constant", "contributes what it contributed"),
        ("frame a peer", "contributes values that oppose"),
        ("sign flip, quarantine", "contributes values that oppose"),
        ("little, both signs, quarantine", "contributes values that differ from those"),
        ("slow drip", "contributes values that differ from those"),
    ],
)
def test_only_the_attacker_is_named(runs: dict[str, dict[str, Any]], name: str, text: str) -> None:
    assert set(runs[name]["named"]) == {ATTACKER}
    assert any(text in one for one in runs[name]["named"][ATTACKER])


@pytest.mark.parametrize("name", [one for one in CASES if one.endswith(", quarantine")])
def test_an_attacker_is_quarantined_and_the_others_learn(
    runs: dict[str, dict[str, Any]], name: str
) -> None:
    assert runs[name]["quarantined"] == [int(ATTACKER)]
    assert (runs[name]["steps"], runs[name]["problem"]) == (STEPS, "")
    assert runs[name]["accuracy"] > 0.85


def test_clipping_saves_a_model_that_a_large_contribution_destroys(
    runs: dict[str, dict[str, Any]],
) -> None:
    assert runs["x100"]["accuracy"] < 0.3
    assert runs["x100, clip"]["accuracy"] > 0.8


def test_with_like_data_krum_learns_beside_flipped_signs(runs: dict[str, dict[str, Any]]) -> None:
    assert runs["sign flip x3, krum"]["accuracy"] > 0.85

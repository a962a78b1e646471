"""Tests of docs/robustness.md: each attack in its table has a test that exists.

The attacks of virtual runs are exactly those of tests/simulated/test_insiders.py.

Left out: what the tests prove.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.simulated.test_insiders import ATTACKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Which test makes which attack\n")[2].partition("\n## ")[0]
VIRTUAL = "simulated/test_insiders.py"


def test_exactly_the_attacks_of_virtual_runs_are_listed() -> None:
    (listed,) = re.findall(rf"^\| (.+) \| `{VIRTUAL}` \|$", SECTION, flags=re.MULTILINE)
    assert listed.split("; ") == list(ATTACKS)


def test_each_other_attack_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (.+) \| `([\w/]+\.py)`: `(\w+)` \|$", SECTION, flags=re.MULTILINE)
    lines = [line for line in SECTION.splitlines() if line.startswith("| ")]
    assert len(rows) == len(lines) - 2  # the header and the virtual runs
    for attack, path, test in rows:
        tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        assert test in functions, (attack, path, test)

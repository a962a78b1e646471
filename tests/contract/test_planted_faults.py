"""Tests of the faults that `tools/mutate.py` plants: they can be planted and are numerous enough.

Every exchange policy and every area has its faults. The text of each fault occurs once, and its
tests exist. A fault is caught by its nearest tests, only by wider ones, or not at all. It is not
judged if its tests fail anyway or its text is missing. Afterwards the module is unchanged.

Left out: that the tests find the faults (`make mutate`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlion_core.policies.catalogue import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
AREAS = {"cli": 10, "exchange": 15, "operator": 30, "policies": 40, "simulator": 10, "worker": 20}
"""Files of faults, and the minimum number of each."""


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    return tool


TOOL = _tool()
FAULTS = {fault.name: fault for fault in TOOL.read_faults()}


def test_every_policy_and_every_area_has_faults() -> None:
    assert set(BUILT_IN) - {"none"} <= set(FAULTS)
    for path in TOOL.FAULTS.glob("*.toml"):
        assert path.read_text().count("\nmodule = ") >= AREAS[path.stem]


def test_no_two_faults_are_equal() -> None:
    texts = Counter((fault.module, fault.old, fault.new) for fault in FAULTS.values())
    assert max(texts.values()) == 1


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_fault_can_be_planted(name: str) -> None:
    assert TOOL.stale(FAULTS[name]) == ""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A repository of one correct module, and of one test that each test here writes."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p pytest_timeout -p no:cacheprovider -ra")
    package = tmp_path / "api" / "tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "here.py").write_text("VALUE = 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  measured\n")
    return TOOL.Tree(tmp_path)


def judged(tree: Any, assertion: str) -> Any:
    """The finding for a wrong value, with that assertion as its nearest test and a better one."""
    for name, facts in (("here", assertion), ("wider", "here.VALUE == 1")):
        lines = ["from tiny import here", f"def test_{name}():", f"    assert {facts}"]
        (tree.root / f"test_{name}.py").write_text("\n".join(lines))
    wider = ("test_wider.py",) if "wider" in assertion else ()
    change = ("VALUE = 1", "VALUE = 2")
    fault = TOOL.Fault("wrong value", "tiny.here", *change, ("test_here.py",), wider)
    failing = TOOL.failing_files(tree, [fault])
    return TOOL.judge(tree, fault, failing)


@pytest.mark.parametrize(
    ("assertion", "verdict", "by"),
    [
        ("here.VALUE == 1", "unit", "test_here"),
        ("here.VALUE or 'wider'", "wider", "test_wider"),
        ("here.VALUE", "survived", ""),
        ("here.VALUE == 3", "not judged", "test_here.py fails without the fault (test_here)"),
    ],
)
def test_only_tests_that_pass_before_can_catch_a_fault(
    tree: Any, assertion: str, verdict: str, by: str
) -> None:
    found = judged(tree, assertion)
    assert (found.verdict, found.by) == (verdict, by)
    assert (tree.root / "api" / "tiny" / "here.py").read_text() == "VALUE = 1\n"


@pytest.mark.parametrize(
    ("module", "old", "problem"),
    [
        ("tiny.gone", "VALUE = 1", "no module tiny.gone"),
        ("tiny.here", "VALUE = 7", "its text occurs 0 times in tiny.here, not once"),
        ("tiny.here", "VALUE = 1", "no test_gone.py"),
    ],
)
def test_a_stale_fault_is_named_and_not_judged(
    tree: Any, module: str, old: str, problem: str
) -> None:
    fault = TOOL.Fault("stale", module, old, "VALUE = 2", ("test_gone.py",))
    assert TOOL.stale(fault, tree.root) == problem
    found = TOOL.judge(tree, fault, {})
    assert (found.verdict, found.by) == ("not judged", problem)


def test_the_summary_counts_verdicts() -> None:
    findings = [
        TOOL.Finding(verdict, "tiny.here", TOOL.Verdict(verdict), "")
        for verdict in ("unit", "unit", "wider", "survived")
    ]
    totals = TOOL.summary(findings)
    assert (totals["caught_by_unit_fraction"], totals["caught_fraction"]) == (0.5, 0.75)
    assert (totals["faults"], totals["survived"], totals["not_judged"]) == (4, 1, 0)

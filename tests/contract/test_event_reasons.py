"""Tests of reasons of events: docs/results.md has exactly those of `dlion_api.reasons`, and no
other code spells one.

Left out: whether each is emitted (the tests of the parts).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from dlion_api.reasons import EventReason

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for package in (
        "api/dlion_api",
        "worker",
        "operator/dlion_operator",
        "cli/dlion_cli",
    )
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "reasons.py" or path.parent.name != "dlion_api"
]
Nodes = list[ast.Constant | ast.Call]
EMITTERS = {"event", "_report", "EventRecord", "Companion"}


def test_the_document_has_each_reason_with_its_meaning() -> None:
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    section = text.partition("### Reasons of events\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^- `(\w+)`: (.+)$", section, flags=re.MULTILINE)
    assert rows == [(reason.value, reason.meaning) for reason in EventReason]


def test_a_meaning_is_one_line_that_fits_a_table() -> None:
    for reason in EventReason:
        assert re.fullmatch(r"([A-Z][a-z]+)+", reason.value)
        assert reason.meaning
        assert not set(reason.meaning) & set("\n|")


def test_reasons_are_spelt_once() -> None:
    known = {reason.value for reason in EventReason}
    spelt = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in SOURCES
        for node in _parsed(path)
        if isinstance(node, ast.Constant) and node.value in known
    ]
    assert spelt == []


def test_no_event_has_a_literal_reason() -> None:
    calls = [(path, call) for path in SOURCES for call in _emitting(path)]
    assert len(calls) > 20, "the emitters have the names that this test searches for"
    own = [
        f"{path.relative_to(ROOT)}:{value.lineno}: {value.value}"
        for path, call in calls
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and re.fullmatch(r"[A-Z]\w+", value.value)
    ]
    assert own == []


@functools.cache
def _parsed(path: Path) -> Nodes:
    """Values and calls of that file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.Call)]


def _emitting(path: Path) -> Iterator[ast.Call]:
    for node in _parsed(path):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in EMITTERS:
                yield node

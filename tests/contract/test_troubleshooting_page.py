"""Tests of docs/troubleshooting.md.

It has each event that requires attention. Its messages and reasons are in the code, so no row
describes a text that DLion does not print. Each row has a cause and a remedy.
test_exit_codes_page.py covers ends of runs, test_conditions_page.py conditions.

Left out: that the advice helps.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from dlion_api.reasons import EventReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ATTENTION = {
    EventReason.PEERS_UNREACHED, EventReason.WORKER_FAILED,
    EventReason.TRAINER_ENDED, EventReason.SIDECAR_ENDED, EventReason.EVALUATOR_ENDED,
    EventReason.CERTIFICATE_NOT_RENEWED, EventReason.QUORUM_LOST, EventReason.MESSAGE_REFUSED,
    EventReason.PROGRAM_PART_UNUSED, EventReason.CHECKPOINT_FAILED,
    EventReason.KEEPER_AWAY, EventReason.KEEP_FAILED,
    EventReason.PUBLISH_FAILED, EventReason.DATA_SKIPPED, EventReason.DATA_PENDING,
    EventReason.DATA_UNAVAILABLE, EventReason.ENVIRONMENT_FAILED,
}  # fmt: skip
"""Events after which a person must act."""
VALUE = "…"
"""Placeholder for variable parts of a message, here and on the page."""


def rows() -> list[list[str]]:
    """Cells of the rows of each table about symptoms."""
    tables = PAGE.split("| what you see | cause | what to do |\n|---|---|---|\n")[1:]
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@functools.cache
def printed_texts() -> str:
    """Each text in the sources, one on each line; inserted values are `…`."""
    texts = []
    for package in ("api", "operator", "worker", "cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (getattr(part, "value", "") for part in node.values)
                    texts.append("".join(p if isinstance(p, str) else VALUE for p in parts))
    return "\n".join(texts)


def shown(cell: str) -> list[str]:
    """The parts of a cell in code."""
    return [text for _, text in re.findall(r"(`+)\s?(.+?)\s?\1(?!`)", cell)]


def test_each_event_that_requires_attention_is_on_the_page() -> None:
    wanted = {each.value for each in ATTENTION}
    assert wanted - {text for cells in rows() for text in shown(cells[0])} == set()


def test_every_row_has_cause_and_advice() -> None:
    assert len(rows()) > 30
    for cells in rows():
        assert len(cells) == 3, cells
        assert all(cells), cells


@pytest.mark.parametrize("cell", [cells[0] for cells in rows()])
def test_the_texts_of_a_row_are_in_the_code(cell: str) -> None:
    for text in shown(cell):
        assert text in printed_texts(), f"nothing prints {text!r}"

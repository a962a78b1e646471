"""Facts: docs/troubleshooting.md has each reason and exit code that ends a run, and each event that
asks for attention; test_conditions_page.py has the reasons of conditions. What it shows as a
message or reason is in the code: no row describes what DLion does not print. Each row says what the
cause is and what to do.

Left out: that the advice helps.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.reasons import EventReason
from dlion_results.summary.judgement import EndReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
ATTENTION = {
    EventReason.PEERS_UNREACHED, EventReason.WORKER_LOST, EventReason.WORKER_FAILED,
    EventReason.TRAINER_ENDED, EventReason.SIDECAR_ENDED, EventReason.EVALUATOR_ENDED,
    EventReason.CERTIFICATE_NOT_RENEWED, EventReason.QUORUM_LOST, EventReason.MESSAGE_REFUSED,
    EventReason.PROGRAM_PART_UNUSED,
    EventReason.EVALUATION_FAILED, EventReason.RECORDS_DROPPED, EventReason.CHECKPOINT_FAILED,
    EventReason.CHECKPOINT_DAMAGED, EventReason.KEEPER_AWAY, EventReason.KEEP_FAILED,
    EventReason.PUBLISH_FAILED, EventReason.DATA_SKIPPED, EventReason.DATA_PENDING,
    EventReason.DATA_UNAVAILABLE, EventReason.ENVIRONMENT_FAILED,
}  # fmt: skip
"""Events of what fails or waits. Others report what went as it should."""
VALUE = "…"
"""Stands for what a message has from elsewhere, here and on the page."""


def rows() -> list[list[str]]:
    """Cells of the rows of each table about symptoms."""
    tables = PAGE.split("| what you see | cause | what to do |\n|---|---|---|\n")[1:]
    lines = [line for table in tables for line in table.partition("\n\n")[0].splitlines()]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@functools.cache
def printed_texts() -> str:
    """Each text in the sources, one a line; values that are put into it are `…`."""
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
    """What a cell has as code."""
    return [text for _, text in re.findall(r"(`+)\s?(.+?)\s?\1(?!`)", cell)]


def test_each_reason_that_ends_a_run_is_on_the_page() -> None:
    wanted = {each.value for each in [*EndReason, *ATTENTION]} - {EndReason.COMPLETED.value}
    assert wanted - {text for cells in rows() for text in shown(cells[0])} == set()


def test_each_exit_code_of_a_failure_is_on_the_page() -> None:
    named = {int(code) for cells in rows() for code in re.findall(r"exit code (\d+)", cells[0])}
    assert {code.value for code in ExitCode if code is not ExitCode.OK} - named == set()


def test_every_row_has_cause_and_advice() -> None:
    assert len(rows()) > 60
    for cells in rows():
        assert len(cells) == 3, cells
        assert all(cells), cells


@pytest.mark.parametrize("cell", [cells[0] for cells in rows()])
def test_what_a_row_shows_is_in_the_code(cell: str) -> None:
    for text in shown(cell):
        assert text in printed_texts(), f"nothing prints {text!r}"

"""Tests of docs/conditions.md.

It has a row for exactly the conditions and reasons of `dlion_api.status`, each with a remedy. It
has one for exactly the operator's own events, and names exactly the events that come from workers'
records. No event of the operator has a reason that events of workers have.

Left out: the conditions of each situation (tests/unit/operator).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from dlion_api.reasons import EventReason
from dlion_api.status import ConditionType, Reason
from dlion_operator.served_runs.worker_events import (
    BANDWIDTH_DROPPED,
    CALLER_REFUSED,
    FORWARDED_REASONS,
    OBSERVED_REASONS,
    PEER_LOST,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/conditions.md").read_text(encoding="utf-8")


def test_exactly_the_reasons_are_explained() -> None:
    section = PAGE.partition("## Reasons of conditions\n")[2].partition("\nWhenever")[0]
    rows = re.findall(r"^\| `(\w+)` \| .+ \|$", section, flags=re.MULTILINE)
    assert sorted(rows) == sorted(reason.value for reason in Reason)


def test_exactly_the_events_of_workers_are_named() -> None:
    section = PAGE.partition("\nWorkers' reports become events")[2]
    rows = re.findall(r"^- `(\w+)`: .+$", section, flags=re.MULTILINE)
    assert rows == [BANDWIDTH_DROPPED, PEER_LOST, EventReason.PEERS_UNREACHED]
    named = re.findall(r"`(\w+)`", section.partition("\nOther events")[0])
    same = FORWARDED_REASONS - {EventReason.WORKER_LOST, EventReason.PEERS_UNREACHED}
    assert sorted(named) == sorted(same)  # docs/results.md explains each (test_event_reasons.py)


def test_exactly_the_events_of_the_operator_are_explained() -> None:
    section = PAGE.partition("\nWhenever the reason")[2].partition(
        "\nWorkers' reports become events"
    )[0]
    rows = re.findall(r"^- `(\w+)`: .+$", section, flags=re.MULTILINE)
    of_conditions = {Reason.SPEC_DIFFERS.value, Reason.NO_AUTHORITY.value}
    assert sorted(rows) == sorted({*event_reasons_in_source(), CALLER_REFUSED, *of_conditions})


def test_no_event_of_the_operator_has_a_reason_of_workers() -> None:
    """The reason decides whether a record's event is of a worker or of the job
    (`EventRecord.is_of_worker`).
    """
    own = {*event_reasons_in_source(), *map(str, Reason), *OBSERVED_REASONS}
    assert own.isdisjoint(map(str, EventReason))


def event_reasons_in_source() -> set[str]:
    """Literal reasons that the operator's code gives to an event."""
    return {
        call.args[0].value
        for path in (ROOT / "operator" / "dlion_operator").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "JobEvent"
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def test_every_condition_is_explained_with_a_remedy() -> None:
    section = PAGE.partition("\n## Conditions\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0].strip(" `") for row in rows] == [type_.value for type_ in ConditionType]
    for _, if_true, if_false, _, to_do in rows:
        assert all(text.strip() for text in (if_true, if_false, to_do))


def test_every_reason_has_a_remedy() -> None:
    section = PAGE.partition("## Reasons of conditions\n")[2].partition("\nWhenever")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", section, flags=re.MULTILINE)
    assert len(rows) == len(Reason)

"""Tests of docs/faults.md: it has every end of a worker and every action with its effect.

The expected cells of both tables come from supervisor, operator and rendered Jobs, not from
declarations alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_api.spec import load_job
from dlion_api.spec.failures import ENDS, FailureAction, FailureRule, WorkerEnd, end_of_exit
from dlion_operator.children.worker_jobs import worker_job
from dlion_worker.supervisor.supervision import ExitSupervisor, LogEvent, Supervision
from operator_world import SETTINGS, World, dlion_job, ready_reason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
CODES = {end: kind.codes[0] if kind.codes else int(ExitCode.FAILED) for end, kind in ENDS.items()}
WITHOUT_TRAINER: tuple[WorkerEnd, ...] = ("Disrupted", "InitializerFailed")
"""Ends that have no exit code of a trainer."""


def table(heading: str) -> list[list[str]]:
    """The cells of the table with this heading of the first column, without the header."""
    text = PAGE.read_text()
    rows = re.split(rf"^\| {heading} \|.*\n\|[-|]+\n", text, flags=re.MULTILINE)[1]
    lines = rows.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_has_every_end_with_its_effect() -> None:
    rows = {row[0].strip("`"): row[1:] for row in table("end")}
    assert list(rows) == list(ENDS)
    for end, kind in ENDS.items():
        code, meaning, action, retried = rows[end]
        expected = {"Crashed": "1 and others", **dict.fromkeys(WITHOUT_TRAINER, "any")}.get(
            end, str(CODES[end])
        )
        assert (code, meaning, action) == (expected, kind.meaning, f"`{kind.action}`"), end
        assert retried == ("yes" if is_retried(end) else "no"), end
        assert end in WITHOUT_TRAINER or end_of_exit(CODES[end]) == end


def is_retried(end: WorkerEnd) -> bool:
    """Return whether a run starts again after its only worker has failed
    permanently in this way.
    """
    world = World(dlion_job({"small": 1}, maxRetries=1))
    world.look()
    world.make_jobs()
    world.train()
    world.look()
    world.end("small", failed="0", exit_code=CODES[end])
    if end == "Disrupted":
        world.fail("small", 0, ExitCode.INTERRUPTED)
        world.pods["small-0"]["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True"}
        ]
    if end == "InitializerFailed":
        world.fail_download("small", 0, CODES[end])
    return ready_reason(world.look())[0] == "Retrying"


@pytest.mark.parametrize("action", get_args(FailureAction))
def test_the_page_has_every_action_with_its_effect(action: FailureAction) -> None:
    rows = {row[0].strip("`"): row[1:] for row in table("action")}
    assert list(rows) == list(get_args(FailureAction))
    in_pod, pod, counts, run = rows[action]
    rule = FailureRule(on_ends=("Crashed",), action=action)
    supervision = Supervision(max_restarts=1, grace_s=4.0, failure_rules=(rule,))
    supervision.start(0.0)
    done = supervision.child_exited(ExitCode.FAILED, 1.0)
    restarts = not any(isinstance(each, ExitSupervisor) for each in done)
    assert in_pod.startswith("another starts") == restarts
    counted = [each.details.get("restart") for each in done
               if isinstance(each, LogEvent) and each.event == "restarting"]  # fmt: skip
    assert counts == ("yes" if counted == [1] else "no")
    assert pod == f"{'another' if restarts else 'no other'} pod (`{pod_action(action)}`)"
    assert ("continues" in run) == restarts
    assert ("`FailedByRule`" in run) == (reason_after(action) == "FailedByRule")


def pod_action(action: str) -> str:
    """Return the action of the Job for a pod with a crashed trainer."""
    job = load_job(dlion_job(failureRules=[{"onEnds": ["Crashed"], "action": action}]))
    group = job.spec.sites[0].groups[0]
    made: Any = worker_job(job, group, SETTINGS, {"uid": "u-1", "name": "digits"})
    actions = [
        each["action"]
        for each in made["spec"]["podFailurePolicy"]["rules"]
        if each.get("onExitCodes", {}).get("operator") == "NotIn"
    ]
    return str(actions[0])


def reason_after(action: str) -> str:
    """Return the reason of a run whose only worker has crashed permanently."""
    rules = [{"onEnds": ["Crashed"], "action": action}]
    world = World(dlion_job({"small": 1}, failureRules=rules))
    world.look()
    world.make_jobs()
    world.train()
    world.look()
    world.end("small", failed="0", exit_code=ExitCode.FAILED)
    return ready_reason(world.look())[0]

"""A decision that writes a status: the events that follow from it, and when to look again. Pure."""

from collections.abc import Iterator
from typing import Any

from dlion_api.status import ConditionType, Reason
from dlion_operator.model.job_view import Document, condition
from dlion_operator.plan.decisions import Action, Decision, JobEvent
from dlion_operator.plan.observed import Observed
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase

REQUEUE_S = 10.0
_WARNING_PHASES = (JobPhase.FAILED, JobPhase.STUCK, JobPhase.DEGRADED, JobPhase.KEEPER_AWAY)


def with_status(
    diagnosis: Diagnosis, observed: Observed, status: dict[str, Any], actions: tuple[Action, ...]
) -> Decision:
    """A decision with this status, and the events that follow from it."""
    events = tuple(_events(diagnosis, observed, {"status": status}))
    # A suspended job does not change at this site, but it may at others.
    is_alone = len(status.get("sites") or ()) < 2
    is_held = observed.queue is not None and observed.queue.problem  # its quota, perhaps
    is_idle = diagnosis.phase is JobPhase.NOT_SELECTED or (
        diagnosis.phase is JobPhase.SUSPENDED and is_alone and not is_held
    )
    looks_again = observed.terminating.documents or not is_idle
    return Decision(actions, status, events, REQUEUE_S if looks_again else None)


def _events(diagnosis: Diagnosis, observed: Observed, after: Document) -> Iterator[JobEvent]:
    """The events for what has changed since the last status; `after` has the next one."""
    before = observed.document
    was, now = (condition(each, ConditionType.SPEC_CONSISTENT) for each in (before, after))
    if now.get("status") == "False" and was.get("status") != "False":
        yield JobEvent(Reason.SPEC_DIFFERS.value, str(now.get("message")), "Warning")
    previous, reason = condition(before, ConditionType.READY), diagnosis.reason
    problem = observed.authority.problem if observed.authority else ""
    is_new = problem in diagnosis.message and problem not in str(previous.get("message"))
    # The diagnosis' own reason has an event below.
    if problem and is_new and reason is not Reason.NO_AUTHORITY:
        yield JobEvent(Reason.NO_AUTHORITY.value, diagnosis.message, "Warning")
    if previous.get("reason") != reason:
        bad = diagnosis.phase in _WARNING_PHASES or reason is Reason.RETRYING
        message = diagnosis.message or reason.value
        yield JobEvent(reason.value, message, "Warning" if bad else "Normal")

"""Select the events of a decision: for what has changed since the last status. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from dlion_api.status import ConditionType, Reason
from dlion_operator.model.job_view import Document, condition
from dlion_operator.plan.decisions import JobEvent
from dlion_operator.plan.observed import Observed
from dlion_operator.plan.outcome.job_phases import Diagnosis, JobPhase

_WARNING_PHASES = (JobPhase.FAILED, JobPhase.STUCK, JobPhase.DEGRADED, JobPhase.KEEPER_AWAY)


def select_events(
    diagnosis: Diagnosis, observed: Observed, status: Mapping[str, Any]
) -> tuple[JobEvent, ...]:
    """Return the events of that diagnosis. `status` is about to be written."""
    return tuple(_events(diagnosis, observed, {"status": status}))


def _events(diagnosis: Diagnosis, observed: Observed, after: Document) -> Iterator[JobEvent]:
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

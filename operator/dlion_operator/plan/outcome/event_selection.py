"""Select the events of a decision: for what has changed since the last status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
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
    before = observed.document
    events = _drift_events(before, status) + _authority_events(diagnosis, observed)
    if condition(before, ConditionType.READY).get("reason") != diagnosis.reason:
        bad = diagnosis.phase in _WARNING_PHASES
        message = diagnosis.message or diagnosis.reason.value
        events += (JobEvent(diagnosis.reason.value, message, "Warning" if bad else "Normal"),)
    return events


def _drift_events(before: Document, status: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """An event when the sites' manifests begin to differ."""
    was, now = (
        condition(each, ConditionType.SPEC_CONSISTENT) for each in (before, {"status": status})
    )
    if now.get("status") != "False" or was.get("status") == "False":
        return ()
    return (JobEvent(Reason.SPEC_DIFFERS.value, str(now.get("message")), "Warning"),)


def _authority_events(diagnosis: Diagnosis, observed: Observed) -> tuple[JobEvent, ...]:
    """An event when a running run begins to lack the authority that its job names."""
    problem = observed.authority.problem if observed.authority else ""
    previous_message = str(condition(observed.document, ConditionType.READY).get("message"))
    is_new = problem in diagnosis.message and problem not in previous_message
    # The diagnosis' own reason already has an event.
    if not problem or not is_new or diagnosis.reason is Reason.NO_AUTHORITY:
        return ()
    return (JobEvent(Reason.NO_AUTHORITY.value, diagnosis.message, "Warning"),)

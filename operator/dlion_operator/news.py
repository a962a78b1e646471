"""What of a decision is worth an event: what is other than the status says that it was. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlion_api.status import ConditionType, Reason
from dlion_operator.decisions import Notice
from dlion_operator.observed import Observed
from dlion_operator.situations import Finding, Situation

Conditions = Sequence[Mapping[str, Any]]

_BAD = (Situation.FAILED, Situation.STUCK, Situation.DEGRADED, Situation.UNKEPT)


def news_of(finding: Finding, seen: Observed, status: Mapping[str, Any]) -> tuple[Notice, ...]:
    """Events of that finding, where `status` is what is to be written of it."""
    before = (seen.document.get("status") or {}).get("conditions") or ()
    notices = _of_drift(before, status) + _of_authority(before, finding, seen)
    if _condition(before, ConditionType.READY).get("reason") != finding.reason:
        bad = finding.situation in _BAD
        words = finding.message or finding.reason.value
        notices += (Notice(finding.reason.value, words, "Warning" if bad else "Normal"),)
    return notices


def _of_drift(before: Conditions, status: Mapping[str, Any]) -> tuple[Notice, ...]:
    """Where the sites' manifests have begun to differ."""
    was, now = (
        _condition(each, ConditionType.SPEC_CONSISTENT)
        for each in (before, status.get("conditions") or ())
    )
    if now.get("status") != "False" or was.get("status") == "False":
        return ()
    return (Notice(Reason.SPEC_DIFFERS.value, str(now.get("message")), "Warning"),)


def _of_authority(before: Conditions, finding: Finding, seen: Observed) -> tuple[Notice, ...]:
    """Where a run that goes on has begun to lack the authority that its job names."""
    problem = seen.authority.problem if seen.authority else ""
    said = str(_condition(before, ConditionType.READY).get("message"))
    is_told_by_reason = finding.reason is Reason.NO_AUTHORITY
    if not problem or problem not in finding.message or problem in said or is_told_by_reason:
        return ()
    return (Notice(Reason.NO_AUTHORITY.value, finding.message, "Warning"),)


def _condition(conditions: Conditions, type_: ConditionType) -> Mapping[str, Any]:
    return next((each for each in conditions if each.get("type") == type_), {})

"""A condition of a job, in the form of metav1.Condition, and the state derived from conditions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dlion_api.document import setting
from dlion_api.status_names import ConditionType, Reason, State

TIME: Mapping[str, Any] = {
    "pattern": "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}"
    r"(\.[0-9]+)?(Z|[-+][0-9:]{5})",
    "pattern_description": "a time such as 2026-01-31T12:00:00Z",
    "max_length": 64,
}
"""Limits of a field with a time."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One condition, in the form of metav1.Condition."""

    type: str = setting("which condition.", min_length=1, max_length=316)
    status: Literal["True", "False", "Unknown"] = setting("whether it is true.")
    reason: str = setting(
        "why, as one CamelCase word.",
        pattern=r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?",
        pattern_description="a CamelCase word",
        max_length=1024,
    )
    message: str = setting("why, for people.", default="", max_length=32768)
    last_transition_time: str = setting("when the status last changed.", **TIME)
    observed_generation: int = setting(
        "generation of the manifest that this refers to.", default=0, minimum=0, maximum=2**53
    )


def state_of(conditions: Iterable[Condition]) -> State:
    """Return the state for these conditions; final ones take precedence.

    Example: a job that lost a site continues to train, and reports that.

    >>> at = "2026-01-31T12:00:00Z"
    >>> def holds(type_: str, reason: str) -> Condition:
    ...     return Condition(type=type_, status="True", reason=reason, last_transition_time=at)
    >>> ready, lost = holds("Ready", "Training"), holds("Degraded", "PeersLost")
    >>> state_of([ready]).value, state_of([ready, lost]).value
    ('Training', 'Degraded')
    """
    by_type = {condition.type: condition for condition in conditions}
    holds = {name for name, condition in by_type.items() if condition.status == "True"}
    for type_, state in (
        (ConditionType.SUCCEEDED, State.SUCCEEDED),
        (ConditionType.FAILED, State.FAILED),
        (ConditionType.SUSPENDED, State.SUSPENDED),
    ):
        if type_ in holds:
            return state
    ready = by_type.get(ConditionType.READY)
    if ready is None:
        return State.PENDING
    if ready.status == "True":
        if ready.reason == Reason.NOT_SELECTED:
            return State.NOT_SELECTED
        return State.DEGRADED if ConditionType.DEGRADED in holds else State.TRAINING
    if ready.reason in (Reason.WAITING_FOR_PEERS, Reason.BELOW_QUORUM):
        return State.WAITING
    return State.PENDING

"""The situations that a job can be in, and the conditions that each stands for. Pure.

One row per situation (the table of docs/conditions.md, which serves kstatus and Argo CD alike);
a condition's `lastTransitionTime` moves only when its status does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from dlion_api.status import Condition, ConditionType, Reason

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Row:
    """What holds in one situation; conditions that are not named are False."""

    ready: Truth
    true: frozenset[ConditionType] = frozenset()
    succeeded: Truth = "Unknown"


class Situation(Enum):
    """What a job is about at this site."""

    WAITING = Row("False", frozenset({ConditionType.RECONCILING}))
    """Pods are starting, or wait for peers."""
    STUCK = Row("False", frozenset({ConditionType.STALLED}))
    """Pods cannot start; nothing will come of waiting alone, but somebody may help.

    Not `Reconciling` as well: kstatus takes the first of the two that it meets for the whole truth.
    """
    TRAINING = Row("True", frozenset({ConditionType.PEERS_CONNECTED}))
    DEGRADED = Row("True", frozenset({ConditionType.DEGRADED}))
    UNKEPT = Row("True", frozenset({ConditionType.DEGRADED, ConditionType.PEERS_CONNECTED}))
    """All train, and nobody keeps what they make."""
    SUSPENDED = Row("True", frozenset({ConditionType.SUSPENDED}))
    NOT_SELECTED = Row("True")
    SUCCEEDED = Row("True", frozenset({ConditionType.SUCCEEDED}), succeeded="True")
    FAILED = Row(
        "False", frozenset({ConditionType.STALLED, ConditionType.FAILED}), succeeded="False"
    )


@dataclass(frozen=True)
class Finding:
    """A situation, why, and in words."""

    situation: Situation
    reason: Reason
    message: str


@dataclass(frozen=True)
class Consistency:
    """Whether the sites' manifests are the same, and where they are not."""

    status: Truth = "Unknown"
    message: str = ""


UNKNOWN = Consistency()


def conditions(
    finding: Finding,
    *,
    before: Iterable[Mapping[str, Any]],
    generation: int,
    now: str,
    consistency: Consistency = UNKNOWN,
) -> tuple[Condition, ...]:
    """All conditions of a job that is in that situation; `before` holds those that were there.

    `now` is a time as Kubernetes writes it.
    """
    earlier = {str(each.get("type")): each for each in before}
    row = finding.situation.value
    result = []
    for type_ in ConditionType:
        is_spec = type_ is ConditionType.SPEC_CONSISTENT
        differs = is_spec and consistency.status == "False"
        status = consistency.status if is_spec else _status(type_, row)
        message = finding.message if _explains(type_, status) else ""
        old = earlier.get(type_.value, {})
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        result.append(
            Condition(
                type=type_.value,
                status=status,
                reason=Reason.SPEC_DIFFERS.value if differs else finding.reason.value,
                message=(consistency.message if is_spec else message)[:4096],
                last_transition_time=str(since or now),
                observed_generation=generation,
            )
        )
    return tuple(result)


def _status(type_: ConditionType, row: Row) -> Truth:
    if type_ is ConditionType.READY:
        return row.ready
    if type_ is ConditionType.SUCCEEDED:
        return row.succeeded
    return "True" if type_ in row.true else "False"


def _explains(type_: ConditionType, status: Truth) -> bool:
    """Whether the message belongs to that condition: the summary, and what is out of the way."""
    return type_ is ConditionType.READY or (
        status == "True" and type_ is not ConditionType.PEERS_CONNECTED
    )

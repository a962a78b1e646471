"""The phases of a job, and the conditions that each one sets. Pure.

One row per phase, as in the table of docs/conditions.md, which serves kstatus and Argo CD alike. A
condition's `lastTransitionTime` changes only with its status.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dlion_api.status import Condition, ConditionType, Reason
from dlion_operator.model.job_view import Document, condition, generation_of

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class PhaseConditions:
    """The conditions of one phase. Conditions that are not listed are False."""

    ready: Truth
    true: frozenset[ConditionType] = frozenset()
    succeeded: Truth = "Unknown"


class JobPhase(Enum):
    WAITING = PhaseConditions("False", frozenset({ConditionType.RECONCILING}))
    """Pods start, or wait for peers."""
    STUCK = PhaseConditions("False", frozenset({ConditionType.STALLED}))
    """Pods cannot start. Waiting alone will not help, but a user may.

    Not `Reconciling` as well: kstatus takes the first of the two that it finds as the whole state.
    """
    TRAINING = PhaseConditions("True", frozenset({ConditionType.PEERS_CONNECTED}))
    DEGRADED = PhaseConditions("True", frozenset({ConditionType.DEGRADED}))
    KEEPER_AWAY = PhaseConditions(
        "True", frozenset({ConditionType.DEGRADED, ConditionType.PEERS_CONNECTED})
    )
    """All workers train, but no keeper stores their results."""
    SUSPENDED = PhaseConditions("True", frozenset({ConditionType.SUSPENDED}))
    NOT_SELECTED = PhaseConditions("True")
    SUCCEEDED = PhaseConditions("True", frozenset({ConditionType.SUCCEEDED}), succeeded="True")
    FAILED = PhaseConditions(
        "False", frozenset({ConditionType.STALLED, ConditionType.FAILED}), succeeded="False"
    )


@dataclass(frozen=True)
class Diagnosis:
    phase: JobPhase
    reason: Reason
    message: str


@dataclass(frozen=True)
class SpecConsistency:
    status: Truth = "Unknown"
    message: str = ""


def job_conditions(
    diagnosis: Diagnosis, document: Document, now: str, consistency: SpecConsistency
) -> tuple[Condition, ...]:
    """All conditions of that DLionJob with that diagnosis. `now` is in Kubernetes' format."""
    row = diagnosis.phase.value
    result = []
    for type_ in ConditionType:
        is_spec = type_ is ConditionType.SPEC_CONSISTENT
        differs = is_spec and consistency.status == "False"
        status = consistency.status if is_spec else _status(type_, row)
        message = diagnosis.message if _carries_message(type_, status) else ""
        old = condition(document, type_)
        since = old.get("lastTransitionTime") if old.get("status") == status else None
        result.append(
            Condition(
                type=type_.value,
                status=status,
                reason=Reason.SPEC_DIFFERS.value if differs else diagnosis.reason.value,
                message=(consistency.message if is_spec else message)[:4096],
                last_transition_time=str(since or now),
                observed_generation=generation_of(document),
            )
        )
    return tuple(result)


def _status(type_: ConditionType, row: PhaseConditions) -> Truth:
    if type_ is ConditionType.READY:
        return row.ready
    if type_ is ConditionType.SUCCEEDED:
        return row.succeeded
    return "True" if type_ in row.true else "False"


def _carries_message(type_: ConditionType, status: Truth) -> bool:
    """Whether that condition carries the message: the summary does, and every problem."""
    return type_ is ConditionType.READY or (
        status == "True" and type_ is not ConditionType.PEERS_CONNECTED
    )

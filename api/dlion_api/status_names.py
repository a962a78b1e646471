"""Names in the status of a `DLionJob`, which are API and never renamed: condition types, reasons,
states, and the metrics of `trainerStatus`.

Apart from `dlion_api.status`, so that commands read a status without the classes of its schema.
Source: kstatus for `Reconciling` and `Stalled`; the rest this project.
"""

from enum import StrEnum
from typing import Final

OPERATOR_METRICS: Final = frozenset({
    "loss", "accuracy", "drift", "globalBatchSize", "iteration", "secondsToTarget", "waitedForRank",
})  # fmt: skip
ACCURACY: Final = "accuracy"
R_SQUARED: Final = "R²"
"""The coefficient of determination, which is the accuracy of targets by default."""
SHARE_SUFFIX: Final = "Fraction"
"""Suffix of the operator's shares of the workers' time."""
PROGRAM_PREFIX: Final = "metric_"
"""Prefix of a program's metric whose name the operator uses."""


def is_of_program(name: str) -> bool:
    """Whether a metric of the status is one that the program's `compile()` names.

    >>> is_of_program("auc"), is_of_program("loss"), is_of_program("metric_loss")
    (True, False, True)
    """
    is_own = name in OPERATOR_METRICS or name.endswith(SHARE_SUFFIX)
    return name.startswith(PROGRAM_PREFIX) or not is_own


def program_metric_name(name: str) -> str:
    """The name in the status of a program's metric; different ones stay different.

    >>> [program_metric_name(name) for name in ("auc", "loss", "metric_loss")]
    ['auc', 'metric_loss', 'metric_metric_loss']
    """
    is_free = is_of_program(name) and not name.startswith(PROGRAM_PREFIX)
    return name if is_free else f"{PROGRAM_PREFIX}{name}"


class ConditionType(StrEnum):
    """Condition types of a job; each is True, False or Unknown."""

    READY = "Ready"  # the summary: the job does what its spec requests
    RECONCILING = "Reconciling"  # the operator is still working on it
    STALLED = "Stalled"  # waiting will not help
    SUSPENDED = "Suspended"
    PEERS_CONNECTED = "PeersConnected"
    SPEC_CONSISTENT = "SpecConsistent"  # all sites have the same manifest
    DEGRADED = "Degraded"  # trains, but without some workers or without a keeper
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reason of a condition's status."""

    PENDING = "Pending"
    WORKERS_STARTING = "WorkersStarting"
    INITIALIZING = "Initializing"
    WAITING_FOR_PEERS = "WaitingForPeers"
    BELOW_QUORUM = "BelowQuorum"
    TRAINING = "Training"
    PEERS_LOST = "PeersLost"
    SPEC_DIFFERS = "SpecDiffers"
    SUSPENDED = "Suspended"
    NOT_SELECTED = "NotSelected"
    COMPLETED = "Completed"
    INVALID_SPEC = "InvalidSpec"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    RESTARTS_EXCEEDED = "RestartsExceeded"
    PROGRAM_FAILED = "ProgramFailed"
    WORKERS_FAILED = "WorkersFailed"
    INITIALIZER_FAILED = "InitializerFailed"
    QUEUED = "Queued"
    QUEUE_INACTIVE = "QueueInactive"
    QUEUE_UNUSABLE = "QueueUnusable"
    RUNTIME_UNAVAILABLE = "RuntimeUnavailable"
    RUNTIME_LIMIT_EXCEEDED = "RuntimeLimitExceeded"
    FORBIDDEN = "Forbidden"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    UNSCHEDULABLE = "Unschedulable"
    PODS_REFUSED = "PodsRefused"
    CONTAINER_BROKEN = "ContainerBroken"
    NOT_JOINING = "NotJoining"
    NOT_LINKED = "NotLinked"
    NOT_EXPOSED = "NotExposed"
    NO_AUTHORITY = "NoAuthority"
    UPKEEP_FAILING = "UpkeepFailing"
    KEEPER_UNAVAILABLE = "KeeperUnavailable"
    MODEL_LOST = "ModelLost"
    ENDED_EARLY = "EndedEarly"
    PARTIAL = "Partial"
    POLICY_DENIED = "PolicyDenied"
    RETRYING = "Retrying"
    FAILED_BY_RULE = "FailedByRule"
    WORKERS_REVOKED = "WorkersRevoked"
    TEMPLATE_NOT_ALLOWED = "TemplateNotAllowed"
    NAMESPACE_EXCLUDED = "NamespaceExcluded"


class State(StrEnum):
    """One word for the printer column, derived from the conditions; not for decisions."""

    PENDING = "Pending"
    WAITING = "Waiting"
    TRAINING = "Training"
    DEGRADED = "Degraded"
    SUSPENDED = "Suspended"
    NOT_SELECTED = "NotSelected"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

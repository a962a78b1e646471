"""The status of a `DLionJob`: its schema, its conditions and the state derived from them.

Not here: the decision which condition is true (the operator's), and telemetry (metrics).
"""

from dlion_api.status.conditions import Condition, state_of
from dlion_api.status.model import (
    INITIAL_STATUS,
    MAX_REVOKED,
    AttemptStatus,
    LinkStatus,
    Metric,
    PairStatus,
    RevokedStatus,
    SiteStatus,
    Status,
    TrainerStatus,
)
from dlion_api.status_names import ConditionType, Reason, State

__all__ = [
    "INITIAL_STATUS",
    "MAX_REVOKED",
    "AttemptStatus",
    "Condition",
    "ConditionType",
    "LinkStatus",
    "Metric",
    "PairStatus",
    "Reason",
    "RevokedStatus",
    "SiteStatus",
    "State",
    "Status",
    "TrainerStatus",
    "state_of",
]

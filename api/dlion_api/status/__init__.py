"""The status of a `DLionJob`: its form, its conditions, and the one word derived from them.

What goes in: what the CRD's status schema holds and how its words are spelt. What stays out: the
decision which condition holds (the operator's), and telemetry (metrics).
"""

from dlion_api.status.conditions import Condition, ConditionType, Reason, State, state_of
from dlion_api.status.model import (
    FRESH,
    MOST_PAIRS,
    LinkStatus,
    Metric,
    PairStatus,
    SiteStatus,
    Status,
    TrainerStatus,
)

__all__ = [
    "FRESH",
    "MOST_PAIRS",
    "Condition",
    "ConditionType",
    "LinkStatus",
    "Metric",
    "PairStatus",
    "Reason",
    "SiteStatus",
    "State",
    "Status",
    "TrainerStatus",
    "state_of",
]

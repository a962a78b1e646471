"""Names in `trainerStatus.metrics`: those that the operator gives, and those of a program."""

from typing import Final

OPERATOR_METRICS: Final = frozenset({
    "loss", "accuracy", "drift", "globalBatchSize", "iteration", "secondsToTarget", "waitedForRank",
})  # fmt: skip
SHARE_SUFFIX: Final = "Fraction"
"""Ends the operator's names of shares of the workers' time."""
PROGRAM_PREFIX: Final = "metric_"
"""Precedes a program's metric that has a name of the operator's."""


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

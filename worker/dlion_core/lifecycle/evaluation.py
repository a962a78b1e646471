"""The result of evaluating one replica. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EvaluationResult:
    """A model's accuracy on some samples; a class without samples counts 0."""

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...]
    samples: int


@dataclass(frozen=True)
class EvaluatedSnapshot:
    """One replica's evaluation on held-out samples; `tag` is the caller's."""

    tag: Any
    evaluation: EvaluationResult
    sketch: tuple[float, ...]
    weights_norm: float

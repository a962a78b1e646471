"""What a worker tells the coordinator as it trains, and what `events.jsonl` holds a line of.

Each record becomes one JSON object with its kind (`record_to_json`, `record_from_json`). Times are
seconds since the run began by the worker's own monotonic clock, set by what the coordinator says at
joining; no wall clock is compared between machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlion_api.names import Rank


@dataclass(frozen=True)
class StepRecord:
    """One iteration of one worker."""

    time_s: float
    rank: Rank
    incarnation: int
    iteration: int
    loss: float
    local_batch_size: int
    global_batch_size: int
    learning_rate: float
    compute_s: float
    wall_s: float
    cpu_s: float
    exchange_cpu_s: float
    """CPU seconds of select, encode, decode and apply in this iteration."""
    waited_s: float
    """Of `wall_s`, held by synchronisation."""
    samples: int
    """This worker's samples since the run began."""
    weights_hash: str = ""
    """Hash of the weights after this step; only where `--set trainer.hashWeights=true` asks."""
    epochs: float | None = None
    """Passes of all workers over the job's training data so far, as this worker counts them; None:
    not known."""

    @property
    def began_s(self) -> float:
        """When it began, on the clock of `time_s`, which is when it was done."""
        return self.time_s - self.wall_s


@dataclass(frozen=True)
class LinkRecord:
    """One link, one direction, since the last record of it."""

    time_s: float
    rank: Rank
    peer: Rank
    iteration: int
    sent_bytes: int
    acknowledged_bytes: int
    unacknowledged_bytes: int
    queued_bytes: int
    budget_bytes: int | None
    bandwidth_bytes_per_s: float | None
    dropped_messages: int
    connected: bool
    remade_count: int = 0
    """How often its stream has gone over to a new connection so far, without a break."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One replica on the held-out split."""

    time_s: float
    rank: Rank
    iteration: int
    samples: int
    accuracy: float
    loss: float
    evaluated_samples: int
    class_accuracy: tuple[float, ...] = ()
    sketch: tuple[float, ...] = ()
    """A random projection of the weights (shared seed): the coordinator computes drift from it."""
    weights_norm: float = 0.0
    final: bool = False


@dataclass(frozen=True)
class DirectiveRecord:
    """What the sidecar told the trainer, and why."""

    time_s: float
    rank: Rank
    iteration: int
    local_batch_size: int
    global_batch_size: int
    budget_bytes: Mapping[Rank, int] = field(default_factory=dict)
    capacities: Mapping[Rank, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: Mapping[Rank, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class EventRecord:
    """Something that happened, with a stable reason (as Kubernetes events have)."""

    time_s: float
    rank: Rank
    iteration: int
    reason: str
    message: str
    warning: bool = False


ProgressRecord = StepRecord | LinkRecord | EvaluationRecord | DirectiveRecord | EventRecord

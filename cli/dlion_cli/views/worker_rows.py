"""Recent rates and the state of each worker, for the live view."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.reasons import EventReason

WINDOW_S = 10.0
"""Averaging time of recent rates."""
QUIET_S = 5.0
"""A worker without a step for this long, and for five mean steps, is waiting."""
_SPARK_COUNT = 12


class WorkerDisplayState(StrEnum):
    """A worker's state, derived from its records."""

    STARTING = "starting"
    TRAINING = "training"
    WAITING = "waiting"
    LOST = "lost"
    QUARANTINED = "quarantined"
    FINISHED = "finished"


_STATES: Mapping[str, WorkerDisplayState] = {
    EventReason.WORKER_READY: WorkerDisplayState.STARTING,
    EventReason.WORKER_LOST: WorkerDisplayState.LOST,
    EventReason.WORKER_FAILED: WorkerDisplayState.LOST,
    EventReason.WORKER_QUARANTINED: WorkerDisplayState.QUARANTINED,
    EventReason.TRAINING_STOPPED: WorkerDisplayState.FINISHED,
    EventReason.MODEL_SAVED: WorkerDisplayState.FINISHED,
}
"""The state after an event, by the event's reason."""


class _StepSample(NamedTuple):
    """The fields of a step that rates need."""

    end_s: float
    wall_s: float
    samples: int


@dataclass
class LinkRow:
    """A link's recent rate and total."""

    time_s: float = 0.0
    bytes_per_s: float = 0.0
    sent_bytes: int = 0
    connected: bool = True

    def add(self, record: LinkRecord) -> None:
        """Add one report."""
        span_s = record.time_s - self.time_s
        if span_s > 0:
            self.bytes_per_s = record.sent_bytes / span_s
        self.time_s = record.time_s
        self.sent_bytes += record.sent_bytes
        self.connected = record.connected


@dataclass
class WorkerRow:
    """One worker in the view."""

    rank: Rank
    name: str
    iteration: int = 0
    loss: float | None = None
    accuracy: float | None = None
    accuracy_name: str = ""
    batch: int = 0
    first_step_s: float | None = None
    links: dict[Rank, LinkRow] = field(default_factory=dict)
    spark: deque[float] = field(default_factory=lambda: deque(maxlen=_SPARK_COUNT))
    _steps: deque[_StepSample] = field(default_factory=deque)
    """The steps in the window."""
    _state: WorkerDisplayState = WorkerDisplayState.STARTING
    _spark_s: float = 0.0

    def add(self, record: ProgressRecord) -> None:
        """Add a record of this worker."""
        match record:
            case StepRecord():
                self._add_step(record)
            case EvaluationRecord():
                self.accuracy, self.accuracy_name = record.accuracy, record.accuracy_name
            case LinkRecord() if record.neighbour or record.peer in self.links:
                self.links.setdefault(record.peer, LinkRow()).add(record)
                if record.time_s >= self._spark_s + 1:
                    self._spark_s = record.time_s
                    self.spark.append(self.bytes_per_s)
            case EventRecord():
                self._state = _STATES.get(record.reason, self._state)
            case _:
                pass

    @property
    def is_quarantined(self) -> bool:
        """Whether it is quarantined: its replica does not count."""
        return self._state is WorkerDisplayState.QUARANTINED

    def state(self, now_s: float) -> WorkerDisplayState:
        """The state at that time of the run."""
        if self._state is not WorkerDisplayState.TRAINING or not self._steps:
            return self._state
        usual_s = sum(step.wall_s for step in self._steps) / len(self._steps)
        quiet_s = now_s - self._steps[-1].end_s
        return WorkerDisplayState.WAITING if quiet_s > max(QUIET_S, 5 * usual_s) else self._state

    @property
    def samples_per_s(self) -> float | None:
        """Over the window; None before the first step."""
        span_s = self._span_s()
        return sum(step.samples for step in self._steps) / span_s if span_s > 0 else None

    @property
    def steps_per_s(self) -> float | None:
        """Over the window; None before the first step."""
        span_s = self._span_s()
        return len(self._steps) / span_s if span_s > 0 else None

    @property
    def bytes_per_s(self) -> float:
        """Recent rate over all links."""
        return sum(link.bytes_per_s for link in self.links.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over all links since the start of the run."""
        return sum(link.sent_bytes for link in self.links.values())

    def _span_s(self) -> float:
        """Duration of the steps in the window; 0 before the first."""
        if not self._steps:
            return 0.0
        return self._steps[-1].end_s - self._steps[0].end_s + self._steps[0].wall_s

    def _add_step(self, record: StepRecord) -> None:
        self.iteration = record.iteration
        self.loss = None if math.isnan(record.loss) else record.loss  # with privacy
        self.batch = record.local_batch_size
        if self.first_step_s is None:
            self.first_step_s = record.time_s - record.wall_s
        if self._state not in {WorkerDisplayState.FINISHED, WorkerDisplayState.QUARANTINED}:
            self._state = WorkerDisplayState.TRAINING
        self._steps.append(_StepSample(record.time_s, record.wall_s, record.local_batch_size))
        while len(self._steps) > 2 and self._steps[0].end_s < record.time_s - WINDOW_S:
            self._steps.popleft()

"""Aggregates the records of a run, one at a time and in bounded memory.

Holds running figures per worker, per link and of the whole job. `folder` feeds it during the run,
so that the summary is ready at its end; `report` feeds it from `events.jsonl`. `summary` interprets
the figures.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dlion_api.drift import DriftMeter
from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    MAX_METRICS,
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProcessRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.reasons import EventReason
from dlion_results.run_folder.stored_values import MAX_NUMBER
from dlion_results.summary.curves import Curve
from dlion_results.summary.decisions import DecisionLog
from dlion_results.summary.training_pauses import TrainingPauses

_LINK_ROWS_IN_ALL = 60_000
"""Rows of all link curves together: 30 workers have 870 links."""
_KEPT_EVENTS = 2000
_METRIC_ROWS = 256
"""Maximum rows of each curve of `metric_curves`."""
MAIN_PHASES = ("select_s", "encode_s", "send_s", "decode_s", "apply_s")
"""Fields of step records: parts of the main thread's wall time."""
PHASES = (*MAIN_PHASES, "link_send_s", "link_receive_s")
"""All phases, with those of the exchange's thread, which runs in parallel."""


@dataclass
class LinkTally:
    """Totals of one link in one direction."""

    curve: Curve
    """Sent bytes so far, budget (bytes per iteration), bandwidth (bytes/s), iterations so far."""
    sent_bytes: int = 0
    acknowledged_bytes: int = 0
    dropped_messages: int = 0
    iterations: int = 0
    budget_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    max_unacknowledged_bytes: int = 0
    max_queued_bytes: int = 0
    weights_bytes: int = 0
    control_bytes: int = 0
    header_bytes: int = 0
    state_bytes: int = 0
    probe_bytes: int = 0
    sent_segments: int | None = None
    """This and the next three are those of the last record that has them."""
    retransmitted_segments: int | None = None
    round_trip_s: float | None = None
    min_round_trip_s: float | None = None
    _dropped: int = 0
    _iteration: int = 0

    def add(self, record: LinkRecord) -> None:
        """Add one report.

        Byte counts are relative to the previous report. Dropped messages are a running total that
        restarts with the worker.
        """
        self.sent_bytes += record.sent_bytes
        self.acknowledged_bytes += record.acknowledged_bytes
        self.dropped_messages += _increase(self._dropped, record.dropped_messages)
        self.iterations += max(0, record.iteration - self._iteration)
        self._dropped, self._iteration = record.dropped_messages, record.iteration
        if record.budget_bytes is not None:
            self.budget_bytes = record.budget_bytes
        if record.bandwidth_bytes_per_s is not None:
            self.bandwidth_bytes_per_s = record.bandwidth_bytes_per_s
        unacknowledged = record.unacknowledged_bytes
        self.max_unacknowledged_bytes = max(self.max_unacknowledged_bytes, unacknowledged)
        self.max_queued_bytes = max(self.max_queued_bytes, record.queued_bytes)
        self.weights_bytes += record.weights_bytes
        self.control_bytes += record.control_bytes
        self.header_bytes += record.header_bytes
        self.state_bytes += record.state_bytes
        self.probe_bytes += record.probe_bytes
        if record.sent_segments is not None:
            self.sent_segments = record.sent_segments
            self.retransmitted_segments = record.retransmitted_segments
            self.round_trip_s, self.min_round_trip_s = record.round_trip_s, record.min_round_trip_s
        self.curve.append(
            record.time_s,
            self.sent_bytes,
            record.budget_bytes,
            record.bandwidth_bytes_per_s,
            self.iterations,
        )


@dataclass
class WorkerTally:
    """Totals of one worker over all of its incarnations."""

    rank: Rank
    pauses: TrainingPauses = field(default_factory=TrainingPauses)
    """The pauses of the run, which its workers share: what `maxSeconds` does not count."""
    steps: int = 0
    samples: int = 0
    incarnations: set[int] = field(default_factory=set)
    started_s: float = math.inf
    last_step_s: float = -math.inf
    last_iteration: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    last_loss: float = math.nan
    batch_min: int = 0
    batch_max: int = 0
    batch_last: int = 0
    compute_s: float = 0.0
    waited_s: float = 0.0
    waited_for_s: dict[int, float] = field(default_factory=dict)
    """Waiting time by the peers that came last, in equal parts."""
    cpu_s: float = 0.0
    exchange_cpu_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds by the fields of `PHASES`; empty: not measured, as by older releases."""
    processes: dict[int, ProcessRecord] = field(default_factory=dict)
    """The last one of each incarnation."""
    imported_s: float = math.inf
    """When the first process that was heard of had imported TensorFlow."""
    best_accuracy: float = math.nan
    last_evaluation: EvaluationRecord | None = None
    passes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Passes over its samples that each incarnation has begun, and those before it, as far as its
    folder has them; where privacy is accounted."""
    unreported_starts: int = 0
    """Starts that were ready to train since its last record of a step."""
    quarantine: str = ""
    """Why it was quarantined (`exchange.quarantine`); empty: it was not."""
    sent_bytes: int = 0
    links: dict[Rank, LinkTally] = field(default_factory=dict)
    loss_curve: Curve = field(default_factory=lambda: Curve(1, limit=1024, averaged=True))
    batch_curve: Curve = field(default_factory=lambda: Curve(1, limit=1024))
    """Local batch size."""
    accuracy_curve: Curve = field(default_factory=lambda: Curve(1, limit=4096))
    """Accuracy on the held-out split."""
    metric_curves: dict[str, Curve] = field(default_factory=dict)
    """Other figures of the program on that split, by their names."""
    sent_curve: Curve = field(default_factory=lambda: Curve(1))
    """Bytes sent so far on all links."""
    samples_curve: Curve = field(default_factory=lambda: Curve(1))
    """Samples trained on so far."""
    pace_curve: Curve = field(default_factory=lambda: Curve(3, limit=256))
    """Samples, seconds of computing and steps so far."""
    capacity_curve: Curve = field(default_factory=lambda: Curve(1, limit=512))
    """Relative compute power in samples/s, reported by this worker's sidecar."""

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first step to the end of the last, without pauses; 0
        without a step."""
        if not self.steps:
            return 0.0
        whole_s = self.last_step_s - self.started_s
        return max(0.0, whole_s - self.pauses.within(self.started_s, self.last_step_s))

    @property
    def samples_per_s(self) -> float:
        """Samples over `span_s`."""
        return self.samples / self.span_s if self.span_s > 0 else 0.0

    @property
    def sample_uses(self) -> int:
        """How often it may have used one sample. An incarnation counts a pass more than it has
        reported: that of steps which were not reported or abandoned at its end. One that has
        reported none counts a pass, until a later one reports how many there were."""
        uses = 0
        for _, (passes, earlier) in sorted(self.passes.items()):
            uses = max(uses, earlier) + passes + 1
        return uses + self.unreported_starts

    def add_step(self, record: StepRecord) -> None:
        batch = record.local_batch_size
        self.batch_min = min(self.batch_min, batch) if self.steps else batch
        self.batch_max = max(self.batch_max, batch)
        self.batch_last = batch
        self.steps += 1
        self.samples += batch
        is_same = record.incarnation in self.incarnations
        self.pauses.add_step(record, self.last_step_s if is_same else None)
        self.incarnations.add(record.incarnation)
        self.unreported_starts = 0
        if record.passes is not None:
            known, earlier = self.passes.get(record.incarnation, (0, 0))
            earlier = max(earlier, record.earlier_passes or 0)
            self.passes[record.incarnation] = max(known, record.passes), earlier
        self.started_s = min(self.started_s, record.began_s)
        self.last_step_s = max(self.last_step_s, record.time_s)
        self.last_iteration = record.iteration
        self.last_loss = record.loss
        self.compute_s += record.compute_s
        self.waited_s += record.waited_s
        for peer in record.waited_for:
            part_s = record.waited_s / len(record.waited_for)
            self.waited_for_s[peer] = self.waited_for_s.get(peer, 0.0) + part_s
        self.cpu_s += record.cpu_s
        self.exchange_cpu_s += record.exchange_cpu_s
        for name in PHASES:
            if (seconds := getattr(record, name)) is not None:
                self.phase_s[name] = self.phase_s.get(name, 0.0) + seconds
        self.pace_curve.append(record.time_s, self.samples, self.compute_s, self.steps)
        if abs(record.loss) < MAX_NUMBER:  # else it has diverged: not even sums are finite
            self.loss_sum += record.loss
            self.loss_count += 1
            self.loss_curve.append(record.time_s, record.loss)
        self.batch_curve.append(record.time_s, batch)
        self.samples_curve.append(record.time_s, self.samples)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Add one evaluation of this replica. A final one, over the whole split, takes
        precedence."""
        earlier = self.last_evaluation
        if earlier is None or record.final or not earlier.final:
            self.last_evaluation = record
        if math.isfinite(record.accuracy):
            self.best_accuracy = max(
                record.accuracy, -1.0 if math.isnan(self.best_accuracy) else self.best_accuracy
            )
            if record.final:  # evaluated on different samples than before
                self.accuracy_curve.hold(record.time_s)
            self.accuracy_curve.append(record.time_s, record.accuracy)
        for name, value in record.metrics.items():
            is_kept = name in self.metric_curves or len(self.metric_curves) < MAX_METRICS
            if is_kept and abs(value) < MAX_NUMBER:
                curve = self.metric_curves.setdefault(name, Curve(1, limit=_METRIC_ROWS))
                if record.final:
                    curve.hold(record.time_s)
                curve.append(record.time_s, value)

    def add_event(self, record: EventRecord) -> None:
        """Follow its starts, and whether it is quarantined: a resumed run accepts it again."""
        if record.reason == EventReason.WORKER_QUARANTINED:
            self.quarantine = record.message
        elif record.reason == EventReason.WORKER_READY:
            self.quarantine = ""
            self.unreported_starts += 1
        elif record.reason == EventReason.TRAINER_IMPORTED:
            self.imported_s = min(self.imported_s, record.time_s)

    @property
    def last_metrics(self) -> dict[str, float]:
        """The figures of `metric_curves` in the evaluation that counts."""
        found = self.last_evaluation.metrics if self.last_evaluation else {}
        return {name: found[name] for name in self.metric_curves if name in found}

    def add_link(self, record: LinkRecord, limit: int) -> None:
        """Add one report of a link; its curve has at most `limit` rows."""
        if record.peer not in self.links:
            self.links[record.peer] = LinkTally(Curve(4, limit=limit))
        self.links[record.peer].add(record)
        self.sent_bytes += record.sent_bytes
        self.sent_curve.append(record.time_s, self.sent_bytes)


class RunTally:
    """Totals of the whole run; `add` takes all workers' records in order."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._pauses = TrainingPauses()
        self.workers = {rank: WorkerTally(rank, self._pauses) for rank in ranks}
        self.end_s = 0.0
        self.drift_curve = Curve(1)
        self.reasons: Counter[str] = Counter()
        self.warning_count = 0
        self.events: deque[EventRecord] = deque(maxlen=_KEPT_EVENTS)
        self.decisions = DecisionLog()
        self._drift = DriftMeter()
        links = max(1, len(self.workers) * (len(self.workers) - 1))
        self._link_rows = min(512, max(32, _LINK_ROWS_IN_ALL // links))

    def add(self, record: ProgressRecord) -> None:
        self.end_s = max(self.end_s, record.time_s)
        match record:
            case StepRecord():
                self._worker(record.rank).add_step(record)
            case ProcessRecord():
                self._worker(record.rank).processes[record.incarnation] = record
            case LinkRecord():
                self._worker(record.rank).add_link(record, self._link_rows)
            case EvaluationRecord():
                self._worker(record.rank).add_evaluation(record)
                point = self._drift.add(record)
                if point is not None and math.isfinite(point[1]):
                    self.drift_curve.append(*point)
            case DirectiveRecord():
                self.decisions.add(record)
                worker = self._worker(record.rank)
                if (own := record.capacities.get(record.rank)) is not None:
                    worker.capacity_curve.append(record.time_s, own)
            case EventRecord():
                self.reasons[record.reason] += 1
                self.warning_count += record.warning
                self.events.append(record)
                if record.rank in self.workers:
                    self.workers[record.rank].add_event(record)

    def _worker(self, rank: Rank) -> WorkerTally:
        """The worker, which need not be in the manifest (counts may differ at a site)."""
        return self.workers.setdefault(rank, WorkerTally(rank, self._pauses))


def trusted_workers(workers: Iterable[WorkerTally]) -> list[WorkerTally]:
    """The workers that are not revoked, whose replicas count."""
    return [worker for worker in workers if not worker.quarantine]


def first_step_s(workers: Iterable[WorkerTally]) -> float | None:
    """Start of any worker's first step, or None: the origin of training time.

    Start-up depends on the machine, so comparisons of runs must use this origin.
    """
    return min((worker.started_s for worker in workers if worker.steps), default=None)


def training_s(workers: Iterable[WorkerTally]) -> float:
    """Seconds from the first step of any worker to the end of the last, without pauses before a
    resume; 0 before the first."""
    trained = [worker for worker in workers if worker.steps]
    began_s = first_step_s(trained)
    if began_s is None:
        return 0.0
    ended_s = max(worker.last_step_s for worker in trained)
    paused_s = max(worker.pauses.within(began_s, ended_s) for worker in trained)
    return max(0.0, ended_s - began_s - paused_s)


def _increase(before: int, now: int) -> int:
    """Increase of a counter; one that fell has restarted from 0."""
    return now - before if now >= before else now

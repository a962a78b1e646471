"""Makes one worker's progress records for the coordinator.

Owns the records (`dlion_api.protocol.progress`) and their clock: seconds since the run began. Never
blocks the loop; the coordination client sends in the background.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Directive, LinkDelivery, SentBytes
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EvaluationRecord,
    EventRecord,
    LinkRecord,
    ProcessRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.reasons import EventReason
from dlion_core.links.events import LinkCounters

_NOTHING_SENT = LinkCounters(
    connected=False,
    queued_bytes=0,
    unacknowledged_bytes=0,
    window_bytes=0,
    sent_total=0,
    acknowledged_total=0,
    dropped_messages=0,
)
LINK_INTERVAL_S = 1.0
"""Shortest interval between link reports. Counters accumulate, so nothing is lost."""
DISTANT_INTERVAL_S = 30.0
"""The same for workers that are not neighbours, of which there are many. With more than 30 the
interval is one second for each, so that all of them together have at most one record a second.
States, which are large and rare, do not wait."""


@dataclass(frozen=True)
class EvaluationResult:
    """A model's accuracy on some samples; a class without samples counts 0."""

    accuracy: float
    loss: float
    class_accuracy: tuple[float, ...]
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other figures that the program names."""
    accuracy_name: str = ""
    """As of `EvaluationRecord`."""


@dataclass(frozen=True)
class EvaluatedSnapshot:
    """One replica's evaluation on held-out samples; `tag` is the caller's."""

    tag: Any
    evaluation: EvaluationResult
    sketch: tuple[float, ...]
    weights_norm: float

    def record(self, rank: Rank, *, final: bool) -> EvaluationRecord:
        """As a record of that worker; the tag must be (iteration, own samples, time)."""
        iteration, samples, time_s = self.tag
        return EvaluationRecord(
            time_s=time_s,
            rank=rank,
            iteration=iteration,
            samples=samples,
            accuracy=self.evaluation.accuracy,
            loss=self.evaluation.loss,
            evaluated_samples=self.evaluation.samples,
            class_accuracy=self.evaluation.class_accuracy,
            sketch=self.sketch,
            weights_norm=self.weights_norm,
            final=final,
            metrics=self.evaluation.metrics,
            accuracy_name=self.evaluation.accuracy_name,
        )


class Reporter:
    """Makes the records of one worker and passes them to `send`."""

    def __init__(
        self,
        *,
        rank: Rank,
        incarnation: int,
        start_monotonic_s: float,
        send: Callable[[list[ProgressRecord]], None],
        clock_s: Callable[[], float],
        unused_links_every_s: float = 0.0,
    ) -> None:
        """`clock_s` is the clock by which the run began at `start_monotonic_s`.

        `unused_links_every_s`: how often an unchanged link without traffic is reported. Observers
        take a link without reports for a lost one.
        """
        self.rank = rank
        self.incarnation = incarnation
        self._start_s = start_monotonic_s
        self._clock_s = clock_s
        self._send = send
        self._counted: dict[Rank, LinkCounters] = {}
        """Each link's counters at its last record."""
        self._unused_links_every_s = unused_links_every_s
        self._reported: dict[Rank, LinkRecord] = {}
        self._next_links_s = 0.0

    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._clock_s() - self._start_s

    def step(self, record: StepRecord) -> None:
        self._send([record])

    def event(
        self, reason: EventReason, message: str, *, iteration: int = 0, warning: bool = False
    ) -> None:
        self._send(
            [EventRecord(self.now_s(), self.rank, iteration, reason, message, warning=warning)]
        )

    def near_duplicates(self, left_out: int, *, kept: int) -> None:
        """Report samples that were left out as near-duplicates, if any."""
        if left_out:
            self.event(
                EventReason.NEAR_DUPLICATES_LEFT_OUT,
                f"{left_out:,} of {kept + left_out:,} samples left out: similar to others",
            )

    def evaluation(self, result: EvaluatedSnapshot, *, final: bool) -> EvaluationRecord:
        """Report one replica's evaluation; its tag is (iteration, own samples, time)."""
        record = result.record(self.rank, final=final)
        self._send([record])
        return record

    def process(self, seconds: Mapping[str, float], iteration: int) -> None:
        """Report the time of this process by phase; the names are fields of `ProcessRecord`."""
        record = ProcessRecord(self.now_s(), self.rank, self.incarnation, iteration, **seconds)
        self._send([record])

    def directive(self, directive: Directive, iteration: int) -> None:
        self._send(
            [
                DirectiveRecord(
                    time_s=self.now_s(),
                    rank=self.rank,
                    iteration=iteration,
                    local_batch_size=directive.local_batch_size,
                    global_batch_size=directive.global_batch_size,
                    budget_bytes=directive.budget_bytes,
                    capacities=directive.capacities,
                    bandwidth_bytes_per_s=directive.bandwidth_bytes_per_s,
                    reason=directive.reason,
                )
            ]
        )

    def links(
        self,
        states: Callable[[], Mapping[Rank, LinkCounters]],
        directive: Directive | None,
        iteration: int,
        *,
        now: bool = False,
    ) -> None:
        """Report every link since its last record, when due or `now`; otherwise `states` is not
        called."""
        time_s = self.now_s()
        if time_s < self._next_links_s and not now:
            return
        self._next_links_s = time_s + LINK_INTERVAL_S
        counted = states()
        distant_count = sum(not state.neighbour for state in counted.values())
        distant_every_s = max(DISTANT_INTERVAL_S, distant_count * LINK_INTERVAL_S)
        records = [self._link(time_s, peer, s, directive, iteration) for peer, s in counted.items()]
        due = [
            record
            for record in records
            if now or self._is_worth_reporting(record, counted[record.peer], distant_every_s)
        ]
        for record in due:  # what is left out now is part of a later record
            self._reported[record.peer], self._counted[record.peer] = record, counted[record.peer]
        if due:
            self._send(list[ProgressRecord](due))

    def _is_worth_reporting(
        self, record: LinkRecord, state: LinkCounters, distant_every_s: float
    ) -> bool:
        """False for an unused link that was reported without change a short while ago. Headers, as
        of heartbeats, do not count."""
        last = self._reported.get(record.peer)
        if last is not None and not (last.neighbour or record.neighbour):
            is_due = record.time_s >= last.time_s + distant_every_s
            others = record.sent_bytes or record.probe_bytes
            return bool(record.state_bytes or (is_due and others))
        if last is None or state.sent_total or record.state_bytes or record.probe_bytes:
            return True
        if record.time_s >= last.time_s + self._unused_links_every_s:
            return True
        unchanged = replace(
            last,
            time_s=record.time_s,
            iteration=record.iteration,
            header_bytes=record.header_bytes,
            state_bytes=0,
            probe_bytes=0,
        )
        return record != unchanged

    def _link(
        self,
        time_s: float,
        peer: Rank,
        state: LinkCounters,
        directive: Directive | None,
        iteration: int,
    ) -> LinkRecord:
        before, facts = self._counted.get(peer, _NOTHING_SENT), state.connection
        return LinkRecord(
            time_s=time_s,
            rank=self.rank,
            peer=peer,
            iteration=iteration,
            sent_bytes=state.sent_total - before.sent_total,
            acknowledged_bytes=state.acknowledged_total - before.acknowledged_total,
            unacknowledged_bytes=state.unacknowledged_bytes,
            queued_bytes=state.queued_bytes,
            budget_bytes=directive.budget_bytes.get(peer) if directive else None,
            bandwidth_bytes_per_s=directive.bandwidth_bytes_per_s.get(peer) if directive else None,
            dropped_messages=state.dropped_messages,
            connected=state.connected,
            remade_count=state.remade_count,
            weights_bytes=state.weights_total - before.weights_total,
            control_bytes=state.control_total - before.control_total,
            header_bytes=state.header_total - before.header_total,
            state_bytes=state.state_total - before.state_total,
            probe_bytes=state.probe_total - before.probe_total,
            neighbour=state.neighbour,
            **({} if facts is None else vars(facts)),
        )


def has_traffic(delivery: LinkDelivery) -> bool:
    """Whether a delivery has any bytes to report."""
    has_payload = delivery.acknowledged_bytes or delivery.unacknowledged_bytes
    return bool(has_payload or delivery.sent != SentBytes())

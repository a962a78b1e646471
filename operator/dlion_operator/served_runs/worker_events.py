"""Turn workers' records and refused callers into Kubernetes events. Pure, with bounded memory.

It selects the records that become events (docs/conditions.md) and limits their rate: each reason of
a job at once, then with its count at growing intervals. So no number of workers floods the API
server.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.protocol.progress import EventRecord, LinkRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_operator.plan.decisions import JobEvent

MIN_PAUSE_S = 60.0
MAX_PAUSE_S = 3600.0
"""Pause between two events of one reason: it doubles from the first to the longest. It starts again
at the first after a silence as long as the longest."""

MAX_KINDS = 64

BASELINE_S = 60.0
"""Time constant of a link's usual bandwidth."""
DROP_FACTOR = 2.0
DROP_DURATION_S = 5.0
"""A link has dropped if it carries less than its usual bandwidth over that factor for this long."""

FORWARDED_REASONS = frozenset(
    {
        EventReason.CERTIFICATE_NOT_RENEWED,
        EventReason.CHECKPOINT_FAILED,
        EventReason.CHECKPOINT_KEPT,
        EventReason.CHECKPOINT_SAVED,
        EventReason.DATA_SKIPPED,
        EventReason.DATA_UNAVAILABLE,
        EventReason.EVALUATION_FAILED,
        EventReason.FOLDED_TOGETHER,
        EventReason.KEEPER_AWAY,
        EventReason.KEEP_FAILED,
        EventReason.MESSAGE_REFUSED,
        EventReason.MODEL_KEPT,
        EventReason.MODEL_PUBLISHED,
        EventReason.PEERS_AWAITED,
        EventReason.PEERS_UNREACHED,
        EventReason.PUBLISH_FAILED,
        EventReason.QUORUM_BACK,
        EventReason.QUORUM_LOST,
        EventReason.RECORDS_DROPPED,
        EventReason.REPLICA_MISSING,
        EventReason.RESUMED,
        EventReason.ROUNDS_PLANNED,
        EventReason.UNUSUAL_VALUES,
        EventReason.WORKER_LOST,
        EventReason.WORKER_REJOINED,
    }
)
"""Reasons of records that become events of the same reason, except for this one:"""
PEER_LOST = "PeerLost"
BANDWIDTH_DROPPED = "BandwidthDropped"
CALLER_REFUSED = "CallerRefused"
WORKER_REVOKED = "WorkerRevoked"
WORKER_RESTORED = "WorkerRestored"
OBSERVED_REASONS = frozenset({BANDWIDTH_DROPPED, CALLER_REFUSED, WORKER_REVOKED, WORKER_RESTORED})
"""Reasons of events that are not a worker's record."""


@dataclass
class _EventSeries:
    """Events of one reason, and of one kind where it has several."""

    reason: str
    count: int = 0
    """Not posted yet."""
    message: str = ""
    warning: bool = False
    due_s: float = float("-inf")
    pause_s: float = MIN_PAUSE_S


@dataclass
class _Baseline:
    """Bandwidth of a link in bytes/s, and since when it has been far lower."""

    bytes_per_s: float
    at_s: float
    low_since_s: float | None = None


class WorkerEvents:
    """The pending events of one run."""

    def __init__(self, workers: Iterable[WorkerIdentity]) -> None:
        self._series: dict[tuple[str, str], _EventSeries] = {}
        """Series by reason and kind."""
        self._links: dict[tuple[Rank, Rank], _Baseline] = {}
        self.expect(workers)

    def expect(self, workers: Iterable[WorkerIdentity]) -> None:
        """Set the run's current workers; only their links are watched."""
        self._names = {worker.rank: worker.name for worker in workers}
        known = self._names.keys()
        self._links = {pair: it for pair, it in self._links.items() if known >= set(pair)}

    def take(self, record: ProgressRecord) -> None:
        match record:
            case EventRecord(rank=rank, reason=reason, message=message, warning=warning):
                if reason in FORWARDED_REASONS:
                    event_reason = PEER_LOST if reason == EventReason.WORKER_LOST else str(reason)
                    self._add(event_reason, f"{self._name(rank)}: {message}", warning=warning)
            case LinkRecord():
                self._watch(record)
            case _:
                pass

    def refuse(self, kind: str, message: str, *, warning: bool) -> bool:
        """Record a refused caller. `kind` names the service and the reason.

        Return whether it is the first pending one of its kind.
        """
        return self._add(CALLER_REFUSED, f"{kind}: {message}", warning=warning, kind=kind)

    def add(self, event: JobEvent, *, kind: str) -> None:
        """Add an event of the operator. Those of one reason and kind share their rate, and so do
        all beyond `MAX_KINDS` of a reason: other sites may invent kinds."""
        if (event.reason, kind) not in self._series:
            kinds = sum(reason == event.reason for reason, _ in self._series)
            kind = kind if kinds < MAX_KINDS else ""
        self._add(event.reason, event.message, warning=event.type == "Warning", kind=kind)

    def pop_due(self, now_s: float) -> tuple[JobEvent, ...]:
        """Return and remove the events that are due."""
        events = []
        for series in self._series.values():
            if not series.count or now_s < series.due_s:
                continue
            is_new = now_s - series.due_s >= MAX_PAUSE_S
            series.pause_s = MIN_PAUSE_S if is_new else series.pause_s
            events.append(
                JobEvent(
                    series.reason,
                    series.message,
                    "Warning" if series.warning else "Normal",
                    count=series.count,
                )
            )
            series.count, series.warning = 0, False
            series.due_s = now_s + series.pause_s
            series.pause_s = min(2 * series.pause_s, MAX_PAUSE_S)
        return tuple(events)

    def _add(self, reason: str, message: str, *, warning: bool, kind: str = "") -> bool:
        series = self._series.setdefault((reason, kind), _EventSeries(reason))
        series.count += 1
        series.message = message
        series.warning |= warning
        return series.count == 1

    def _name(self, rank: Rank) -> str:
        return self._names.get(rank, f"worker {rank}")

    def _watch(self, record: LinkRecord) -> None:
        rate, pair = record.bandwidth_bytes_per_s, (record.rank, record.peer)
        if rate is None or not self._names.keys() >= set(pair):
            return
        usual = self._links.setdefault(pair, _Baseline(rate, record.time_s))
        passed_s = max(0.0, record.time_s - usual.at_s)
        usual.at_s = record.time_s
        if rate * DROP_FACTOR >= usual.bytes_per_s:
            usual.low_since_s = None
            usual.bytes_per_s += (rate - usual.bytes_per_s) * -math.expm1(-passed_s / BASELINE_S)
            return
        if usual.low_since_s is None:
            usual.low_since_s = record.time_s
        if record.time_s - usual.low_since_s >= DROP_DURATION_S:
            link = f"{self._name(record.rank)} to {self._name(record.peer)}"
            message = f"{link}: {_mbit(rate)} Mbit/s, {_mbit(usual.bytes_per_s)} before"
            self._add(BANDWIDTH_DROPPED, message, warning=True)
            self._links[pair] = _Baseline(rate, record.time_s)


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.3g}"

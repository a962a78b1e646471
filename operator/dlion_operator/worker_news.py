"""What a run's workers tell, and who was refused, as Kubernetes events on their DLionJob. Pure,
bounded memory.

Owns which of their records become events (docs/conditions.md) and how often: each reason of a job
is told at once, and then with its count ever more rarely while it goes on, so that no number of
workers floods the API server. Fed by `site_runs` and `refused_callers`; posted by `reconcile`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlion_api.names import Rank, WorkerIdentity
from dlion_api.progress import EventRecord, LinkRecord, ProgressRecord
from dlion_api.reasons import EventReason
from dlion_operator.decisions import Notice

FIRST_PAUSE_S = 60.0
LONGEST_PAUSE_S = 3600.0
"""Between two events of one reason: doubling from the first to the longest, and from the first
again after as long a silence."""

USUAL_S = 60.0
"""Time constant of a link's usual bandwidth."""
DROP_FACTOR = 2.0
DROPPED_FOR_S = 5.0
"""A link that carries less than its usual bandwidth over that factor, for so long, has dropped."""

TOLD = frozenset(
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
        EventReason.PEERS_UNREACHED,
        EventReason.PUBLISH_FAILED,
        EventReason.QUORUM_BACK,
        EventReason.QUORUM_LOST,
        EventReason.RECORDS_DROPPED,
        EventReason.REPLICA_MISSING,
        EventReason.RESUMED,
        EventReason.WORKER_LOST,
        EventReason.WORKER_REJOINED,
    }
)
"""Reasons of records that become events of the same reason, but for this one:"""
PEER_LOST = "PeerLost"
BANDWIDTH_DROPPED = "BandwidthDropped"
CALLER_REFUSED = "CallerRefused"


@dataclass
class _Series:
    """Events of one reason, and of one kind where it has several."""

    reason: str
    count: int = 0
    """Not told yet."""
    message: str = ""
    warning: bool = False
    due_s: float = float("-inf")
    pause_s: float = FIRST_PAUSE_S


@dataclass
class _Usual:
    """What a link carries, bytes/s, and since when it has carried far less."""

    bytes_per_s: float
    at_s: float
    low_since_s: float | None = None


class WorkerNews:
    """One run's events that are still to be told."""

    def __init__(self, workers: Iterable[WorkerIdentity]) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        """By reason and kind."""
        self._links: dict[tuple[Rank, Rank], _Usual] = {}
        self.expect(workers)

    def expect(self, workers: Iterable[WorkerIdentity]) -> None:
        """The run has these workers now; only their links are watched."""
        self._names = {worker.rank: worker.name for worker in workers}
        known = self._names.keys()
        self._links = {pair: it for pair, it in self._links.items() if known >= set(pair)}

    def take(self, record: ProgressRecord) -> None:
        """One record, in the order of arrival."""
        match record:
            case EventRecord(rank=rank, reason=reason, message=message, warning=warning):
                if reason in TOLD:
                    told = PEER_LOST if reason == EventReason.WORKER_LOST else str(reason)
                    self._add(told, f"{self._name(rank)}: {message}", warning=warning)
            case LinkRecord():
                self._watch(record)
            case _:
                pass

    def refuse(self, kind: str, message: str, *, warning: bool) -> bool:
        """A caller was refused; `kind` is by whom and why. Whether it is the first of its kind that
        is not told yet."""
        return self._add(CALLER_REFUSED, f"{kind}: {message}", warning=warning, kind=kind)

    def due(self, now_s: float) -> tuple[Notice, ...]:
        """Events to post now; they are not given again."""
        notices = []
        for series in self._series.values():
            if not series.count or now_s < series.due_s:
                continue
            is_new = now_s - series.due_s >= LONGEST_PAUSE_S
            series.pause_s = FIRST_PAUSE_S if is_new else series.pause_s
            notices.append(
                Notice(
                    series.reason,
                    series.message,
                    "Warning" if series.warning else "Normal",
                    count=series.count,
                )
            )
            series.count, series.warning = 0, False
            series.due_s = now_s + series.pause_s
            series.pause_s = min(2 * series.pause_s, LONGEST_PAUSE_S)
        return tuple(notices)

    def _add(self, reason: str, message: str, *, warning: bool, kind: str = "") -> bool:
        series = self._series.setdefault((reason, kind), _Series(reason))
        series.count += 1
        series.message = message
        series.warning |= warning
        return series.count == 1

    def _name(self, rank: Rank) -> str:
        return self._names.get(rank, f"worker {rank}")

    def _watch(self, record: LinkRecord) -> None:
        """Whether that link carries far less than it did."""
        rate, pair = record.bandwidth_bytes_per_s, (record.rank, record.peer)
        if rate is None or not self._names.keys() >= set(pair):
            return
        usual = self._links.setdefault(pair, _Usual(rate, record.time_s))
        passed_s = max(0.0, record.time_s - usual.at_s)
        usual.at_s = record.time_s
        if rate * DROP_FACTOR >= usual.bytes_per_s:
            usual.low_since_s = None
            usual.bytes_per_s += (rate - usual.bytes_per_s) * -math.expm1(-passed_s / USUAL_S)
            return
        if usual.low_since_s is None:
            usual.low_since_s = record.time_s
        if record.time_s - usual.low_since_s >= DROPPED_FOR_S:
            link = f"{self._name(record.rank)} to {self._name(record.peer)}"
            words = f"{link}: {_mbit(rate)} Mbit/s, {_mbit(usual.bytes_per_s)} before"
            self._add(BANDWIDTH_DROPPED, words, warning=True)
            self._links[pair] = _Usual(rate, record.time_s)


def _mbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:.3g}"

"""How large a peer's gradients and weights may be, measured by those of the others.

The codecs refuse what is not finite. But 1e37 is finite, and one such update makes the receiver's
next loss infinite. So a contribution is compared with the other contributions to the same update
and recent ones of the same workers, and weights with the own ones. A single gradient is nothing to
compare with: of one sample that is learned, or behind dead units, it is nearly or exactly zero. The
bounds are wide: a gradient that explodes honestly is refused too, and one that is merely unusual is
reported (`RecentPeaks`).

Called by the policies with the peaks, the largest magnitudes of messages. At a barrier all workers
compare the same contributions, so that they refuse the same ones. Source: this project.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.interface import Flat, RejectMessage

MAX_GRADIENT_RATIO = 1e4
"""Maximum ratio of a gradient's peak to the lower median of the others', each the largest of the
recent ones. A worker whose data are learned has much smaller gradients than others, so
`MAX_STEP_RATIO` must be exceeded as well."""

MAX_STEP_RATIO = 10.0
"""Maximum ratio of a gradient's peak to the largest weight, or to 1: weights may begin at zero."""

MAX_WEIGHTS_RATIO = 1000.0
"""Maximum ratio of the largest weight of a peer to that of this worker, or to 1."""

MAX_MAGNITUDE = 1e15
"""Maximum of any value if nothing else is known."""

UNUSUAL_RATIO = 100.0
"""Ratio of a peak to the median of the same peer's earlier ones above which a warning is
reported."""

_HISTORY, _MIN_HISTORY = 64, 8


def peak_of_weights(weights_D: Flat) -> float:
    """Return the largest magnitude."""
    return float(max(weights_D.max(initial=0.0), -weights_D.min(initial=0.0)))


def excessive(
    peaks: Mapping[Rank, float],
    own: Rank,
    largest_weight: Callable[[], float],
    recent: Callable[[Rank], float] = lambda _: 0.0,
) -> list[RejectMessage]:
    """Return a rejection for each peer whose contribution would destroy the weights.

    `peaks`: of all contributions to one update, this worker's included; contributions without
    entries are left out. `recent`: the largest of a worker's recent ones; 0: none. Both functions
    are called only for a suspicious one.
    """
    known = sorted(one for one in peaks.values() if one > 0)  # once, as there may be hundreds
    return [
        RejectMessage(rank, reason, PeerRefusal.IMPLAUSIBLE)
        for rank, peak in peaks.items()
        if rank != own
        and peak > _usual_without(peak, known) * MAX_GRADIENT_RATIO
        and (reason := _reason(rank, peak, peaks, largest_weight, recent))
    ]


def _reason(
    rank: Rank,
    peak: float,
    peaks: Mapping[Rank, float],
    largest_weight: Callable[[], float],
    recent: Callable[[Rank], float],
) -> str:
    others = {at: one for at, one in peaks.items() if at != rank}
    most = MAX_MAGNITUDE  # others that never had a gradient are nothing to compare with
    if usual := _usual(max(one, recent(at)) for at, one in others.items()):
        step = MAX_STEP_RATIO * max(1.0, largest_weight())
        most = min(max(usual * MAX_GRADIENT_RATIO, step), MAX_MAGNITUDE)
    if peak <= most:
        return ""
    return f"gradient with values up to {peak:.2g}; allowed: up to {most:.2g}"


def _usual(peaks: Iterable[float]) -> float:
    """Return the lower median of those that are not zero; 0: there are none."""
    known = sorted(one for one in peaks if one > 0)
    return known[(len(known) - 1) // 2] if known else 0.0


def _usual_without(peak: float, known: Sequence[float]) -> float:
    """Return the lower median of the sorted peaks but for this one; 0: there are none."""
    if (middle := (len(known) - 2) // 2) < 0:
        return 0.0
    return known[middle + (bisect_left(known, peak) <= middle)]


def check_weights(theirs_D: Flat, own_D: Flat | None) -> Flat:
    """Return a peer's weights. Raises CallerError if they are far larger than this worker's."""
    check_peak(peak_of_weights(theirs_D), own_D)
    return theirs_D


def check_peak(peak: float, own_D: Flat | None) -> None:
    """Raise CallerError if a peer's largest weight, or change of one, is far above this worker's
    largest weight."""
    most = MAX_MAGNITUDE
    if own_D is not None and (own := peak_of_weights(own_D)):
        most = min(max(1.0, own) * MAX_WEIGHTS_RATIO, MAX_MAGNITUDE)
    if peak > most:
        raise CallerError(
            PeerRefusal.IMPLAUSIBLE, f"weights up to {peak:.2g}; allowed: up to {most:.2g}"
        )


class RecentPeaks:
    """The recent peaks of each worker. Finds gradients that are far larger than the same worker's
    earlier ones, once per worker.

    Where all is learned, the median is next to nothing, and a new sample, a restart or a merge of
    partitions brings back gradients of the usual size. So the largest peaks that any worker ever
    had count, too.
    """

    def __init__(self) -> None:
        self._recent: defaultdict[Rank, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._largest = 0.0
        self._reported: set[Rank] = set()
        self.grown: set[Rank] = set()
        """Workers whose last peak is far above their median, reported or not."""

    def largest(self, rank: Rank) -> float:
        """Return the largest recent peak; 0: none."""
        return max(self._recent.get(rank, ()), default=0.0)

    def add(self, rank: Rank, peak: float) -> str:
        """Record a peak; return what is unusual about it, or nothing."""
        recent = self._recent[rank]
        usual = median(recent) if len(recent) >= _MIN_HISTORY else 0.0
        recent.append(peak)
        known, self._largest = self._largest, max(self._largest, peak)
        self.grown.discard(rank)
        if not usual or peak <= usual * UNUSUAL_RATIO:
            return ""
        self.grown.add(rank)
        if peak <= known or rank in self._reported:
            return ""
        self._reported.add(rank)
        return f"worker {rank} sent values up to {peak:.2g}; its median is {usual:.2g}"


def peaks_of(contributions: Mapping[Rank, Contribution]) -> dict[Rank, float]:
    """Return the peaks of the contributions that have entries."""
    return {rank: one.part.peak for rank, one in contributions.items() if one.part is not None}

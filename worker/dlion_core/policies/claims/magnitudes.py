"""How large a peer's gradients and weights may be, measured by those of the others.

The codecs refuse what is not finite. But 1e37 is finite, and one such update makes the receiver's
next loss infinite. So a contribution is compared with the other contributions to the same update,
and weights with the own ones. The bounds are wide: a gradient that explodes honestly is refused
too, and one that is merely unusual is reported (`UnusualPeaks`).

Called by the policies with the peaks, the largest magnitudes of messages. At a barrier all workers
compare the same contributions, so that they refuse the same ones. Source: ours.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import median

from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.interface import Flat, RejectMessage

MAX_GRADIENT_RATIO = 1e4
"""Of a gradient's peak to the lower median of the others'. A worker whose data are learnt has much
smaller gradients than others, so that `MAX_STEP_RATIO` must be exceeded as well."""

MAX_STEP_RATIO = 10.0
"""Of a gradient's peak to the largest weight; without other gradients, `MAX_GRADIENT_RATIO`."""

MAX_WEIGHTS_RATIO = 1000.0
"""Of the largest weight of a peer to that of this worker."""

MAX_MAGNITUDE = 1e15
"""Of any value, where nothing else is known."""

UNUSUAL_RATIO = 100.0
"""Of a peak to the median of the same peer's earlier ones, for a warning."""

_HISTORY, _MIN_HISTORY = 64, 8


def peak_of_weights(weights_D: Flat) -> float:
    """Return the largest magnitude."""
    return float(max(weights_D.max(initial=0.0), -weights_D.min(initial=0.0)))


def excessive(
    peaks: Mapping[Rank, float], own: Rank, largest_weight: Callable[[], float]
) -> list[RejectMessage]:
    """Return a rejection for each peer whose contribution would destroy the weights.

    `peaks`: of all contributions to one update, this worker's included; contributions without
    entries are left out. `largest_weight` is called only for a suspicious one; 0: unknown.
    """
    return [
        RejectMessage(rank, reason, PeerRefusal.IMPLAUSIBLE)
        for rank, peak in peaks.items()
        if rank != own and (reason := _reason(rank, peak, peaks, largest_weight))
    ]


def _reason(
    rank: Rank, peak: float, peaks: Mapping[Rank, float], largest_weight: Callable[[], float]
) -> str:
    others = sorted(one for at, one in peaks.items() if at != rank and one > 0)
    usual = others[(len(others) - 1) // 2] if others else 0.0
    if peak <= usual * MAX_GRADIENT_RATIO:
        return ""
    # Others without any gradient, such as one whose data are learnt, are nothing to compare with.
    weight = largest_weight() * (MAX_STEP_RATIO if usual else MAX_GRADIENT_RATIO)
    most = max(usual * MAX_GRADIENT_RATIO, weight)
    most = min(most or MAX_MAGNITUDE, MAX_MAGNITUDE)
    if peak <= most:
        return ""
    return f"gradient with values up to {peak:.2g}; allowed: up to {most:.2g}"


def check_weights(theirs_D: Flat, own_D: Flat | None) -> Flat:
    """Return a peer's weights. Raises CallerError if they are far larger than this worker's."""
    check_peak(peak_of_weights(theirs_D), own_D)
    return theirs_D


def check_peak(peak: float, own_D: Flat | None) -> None:
    """Raise CallerError if a peer's largest weight, or change of one, is far above this worker's
    largest weight."""
    own = 0.0 if own_D is None else peak_of_weights(own_D)
    most = min(own * MAX_WEIGHTS_RATIO or MAX_MAGNITUDE, MAX_MAGNITUDE)
    if peak > most:
        raise CallerError(
            PeerRefusal.IMPLAUSIBLE, f"weights up to {peak:.2g}; allowed: up to {most:.2g}"
        )


class UnusualPeaks:
    """Finds gradients that are far larger than the same peer's earlier ones, once per peer."""

    def __init__(self) -> None:
        self._recent: defaultdict[Rank, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._reported: set[Rank] = set()

    def add(self, rank: Rank, peak: float) -> str:
        """Record a peak; return what is unusual about it, or nothing."""
        recent = self._recent[rank]
        usual = median(recent) if len(recent) >= _MIN_HISTORY else 0.0
        recent.append(peak)
        if not usual or peak <= usual * UNUSUAL_RATIO or rank in self._reported:
            return ""
        self._reported.add(rank)
        return f"worker {rank} sent values up to {peak:.2g}; its median is {usual:.2g}"


def peaks_of(contributions: Mapping[Rank, Contribution]) -> dict[Rank, float]:
    """Return the peaks of the contributions that have entries."""
    return {rank: one.part.peak for rank, one in contributions.items() if one.part is not None}

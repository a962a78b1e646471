"""How far replicas have drifted apart, from the short sketches of their weights in their records.

Fed with every evaluation: by the operator for a job's status, by a result folder's tally for the
summary. The trainer makes the sketches (a random projection that keeps distances, the same on every
worker); nothing is known here of models or files.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.progress import EvaluationRecord

_LONGEST_WAIT = 16
"""Evaluations of the others after which a silent replica is left out."""


def drift(sketches: Sequence[Sequence[float]], norms: Sequence[float]) -> float:
    """Largest ‖w_i - w_j‖ over pairs, divided by the mean ‖w‖; 0 with fewer than two replicas.

    Sketches are of one length. NaN where a replica is not finite.
    """
    if len(sketches) < 2 or (scale := sum(norms) / len(norms)) <= 0:
        return 0.0
    # `math.dist` makes tuples of whatever else it gets, each time.
    placed = [tuple(sketch) for sketch in sketches]
    apart = [math.dist(one, other) for one, other in itertools.combinations(placed, 2)]
    return math.nan if any(map(math.isnan, apart)) else max(apart) / scale


@dataclass(frozen=True)
class _Place:
    """Where a replica was."""

    time_s: float
    sketch: array[float]
    norm: float


class DriftMeter:
    """Drift at *equal times* while evaluations come in, each replica at its own pace.

    Whenever the slowest replica has evaluated, the sketches of the others are interpolated to its
    time. Comparing them at unequal times would count the training in between as drift. Keeps up to
    16 sketches of a replica, of 8 bytes an entry.
    """

    def __init__(self) -> None:
        self._recent: dict[Rank, deque[_Place]] = {}
        self._last_s = -math.inf

    def add(self, record: EvaluationRecord) -> tuple[float, float] | None:
        """(time, drift) when this evaluation completes a comparison, else None."""
        if not record.sketch:
            return None
        place = _Place(record.time_s, array("d", record.sketch), record.weights_norm)
        recent = self._recent.setdefault(record.rank, deque(maxlen=_LONGEST_WAIT))
        if recent and (place.time_s < recent[-1].time_s or _size_differs(recent[-1], place)):
            recent.clear()  # another clock, or another model
        elif recent and place.time_s == recent[-1].time_s:
            recent.pop()  # a final evaluation right after an ordinary one
        recent.append(place)
        present = self._present()
        time_s = min(places[-1].time_s for places in present.values())
        if len(present) < 2 or time_s <= self._last_s:
            return None
        placed = [_at(places, time_s) for places in present.values()]
        comparable = [p for p in placed if p is not None and not _size_differs(p, place)]
        if len(comparable) < 2:
            return None
        self._last_s = time_s
        return time_s, drift([p.sketch for p in comparable], [p.norm for p in comparable])

    def _present(self) -> Mapping[Rank, deque[_Place]]:
        """Replicas that still evaluate: not silent for as long as another's memory reaches."""
        full = [r[0].time_s for r in self._recent.values() if len(r) == _LONGEST_WAIT]
        oldest_s = min(full, default=-math.inf)
        return {rank: r for rank, r in self._recent.items() if r[-1].time_s >= oldest_s}


def _size_differs(one: _Place, other: _Place) -> bool:
    return len(one.sketch) != len(other.sketch)


def _at(places: Sequence[_Place], time_s: float) -> _Place | None:
    """One replica at that time; None when it had not evaluated by then."""
    later = next((i for i, place in enumerate(places) if place.time_s >= time_s), None)
    if later is None or (later == 0 and places[0].time_s > time_s):
        return None
    after = places[later]
    before = places[later - 1] if later else after
    span_s = after.time_s - before.time_s
    share = (time_s - before.time_s) / span_s if span_s > 0 else 1.0
    between = (_between(a, b, share) for a, b in zip(before.sketch, after.sketch, strict=True))
    return _Place(time_s, array("d", between), _between(before.norm, after.norm, share))


def _between(before: float, after: float, share: float) -> float:
    return (1 - share) * before + share * after

"""Measure how far replicas have drifted apart, from sketches of their weights.

The operator feeds it each evaluation record for a job's status, and a result folder's tally for
the summary. The trainer makes the sketches: a random projection that preserves distances, the same
on every worker.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord

_MAX_SKETCHES = 16
"""Sketches kept per replica. A replica older than all of another's is left out."""


def drift(sketches: Sequence[Sequence[float]], norms: Sequence[float]) -> float:
    """Return the largest ‖w_i - w_j‖ over pairs, divided by the mean ‖w‖.

    0 with fewer than two replicas; NaN if a replica is not finite. All sketches have one length.
    """
    if len(sketches) < 2 or (scale := sum(norms) / len(norms)) <= 0:
        return 0.0
    # `math.dist` would convert anything else to tuples at each call.
    placed = [tuple(sketch) for sketch in sketches]
    apart = [math.dist(one, other) for one, other in itertools.combinations(placed, 2)]
    return math.nan if any(map(math.isnan, apart)) else max(apart) / scale


@dataclass(frozen=True)
class _SketchPoint:
    """A replica's sketch at one time."""

    time_s: float
    sketch: array[float]
    norm: float


class DriftMeter:
    """Computes drift at *equal times* although replicas evaluate at different times.

    When the slowest replica has evaluated, the sketches of the others are interpolated to its
    time. Comparing them at unequal times would count the training in between as drift. Keeps up to
    16 sketches per replica, with 8 bytes per entry.
    """

    def __init__(self) -> None:
        self._recent: dict[Rank, deque[_SketchPoint]] = {}
        self._last_s = -math.inf

    def add(self, record: EvaluationRecord) -> tuple[float, float] | None:
        """Return (time, drift) if this evaluation completes a comparison, else None."""
        if not record.sketch:
            return None
        place = _SketchPoint(record.time_s, array("d", record.sketch), record.weights_norm)
        recent = self._recent.setdefault(record.rank, deque(maxlen=_MAX_SKETCHES))
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

    def _present(self) -> Mapping[Rank, deque[_SketchPoint]]:
        """Return replicas that still evaluate: newer than the oldest sketch of a full history."""
        full = [r[0].time_s for r in self._recent.values() if len(r) == _MAX_SKETCHES]
        oldest_s = min(full, default=-math.inf)
        return {rank: r for rank, r in self._recent.items() if r[-1].time_s >= oldest_s}


def _size_differs(one: _SketchPoint, other: _SketchPoint) -> bool:
    return len(one.sketch) != len(other.sketch)


def _at(places: Sequence[_SketchPoint], time_s: float) -> _SketchPoint | None:
    """Interpolate a replica to that time; None if it had not evaluated by then."""
    later = next((i for i, place in enumerate(places) if place.time_s >= time_s), None)
    if later is None or (later == 0 and places[0].time_s > time_s):
        return None
    after = places[later]
    before = places[later - 1] if later else after
    span_s = after.time_s - before.time_s
    share = (time_s - before.time_s) / span_s if span_s > 0 else 1.0
    between = (_between(a, b, share) for a, b in zip(before.sketch, after.sketch, strict=True))
    return _SketchPoint(time_s, array("d", between), _between(before.norm, after.norm, share))


def _between(before: float, after: float, share: float) -> float:
    return (1 - share) * before + share * after

"""How far replicas have drifted apart, from short sketches of their weights.

Called by `tally` with every evaluation. The trainer makes the sketches (a random projection that
keeps distances, the same on every worker); nothing is known here of models or files.

Shape suffixes: S entries of a sketch, R replicas.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dlion_api.names import Rank
    from dlion_api.progress import EvaluationRecord

_LONGEST_WAIT = 16
"""Evaluations of the others after which a silent replica is left out."""


def drift(
    sketches: Sequence[Sequence[float] | NDArray[np.float64]], norms: Sequence[float]
) -> float:
    """Largest ‖w_i - w_j‖ over pairs, divided by the mean ‖w‖; 0 with fewer than two replicas."""
    sketch_RS = np.asarray(sketches, dtype=np.float64)
    scale = float(np.mean(norms)) if len(norms) else 0.0
    if len(sketch_RS) < 2 or scale <= 0:
        return 0.0
    apart = [
        float(np.linalg.norm(sketch_RS[later:] - sketch_RS[later - 1], axis=1).max())
        for later in range(1, len(sketch_RS))
    ]
    return max(apart) / scale


class DriftMeter:
    """Drift at *equal times* while evaluations come in, each replica at its own pace.

    Whenever the slowest replica has evaluated, the sketches of the others are interpolated to its
    time. Comparing them at unequal times would count the training in between as drift.
    """

    def __init__(self) -> None:
        self._recent: dict[Rank, deque[EvaluationRecord]] = {}
        self._last_s = -np.inf

    def add(self, record: EvaluationRecord) -> tuple[float, float] | None:
        """(time, drift) when this evaluation completes a comparison, else None."""
        if not record.sketch:
            return None
        recent = self._recent.setdefault(record.rank, deque(maxlen=_LONGEST_WAIT))
        if recent and (record.time_s < recent[-1].time_s or _size_differs(recent[-1], record)):
            recent.clear()  # another clock, or another model
        elif recent and record.time_s == recent[-1].time_s:
            recent.pop()  # a final evaluation right after an ordinary one
        recent.append(record)
        present = self._present()
        time_s = min(entries[-1].time_s for entries in present.values())
        if len(present) < 2 or time_s <= self._last_s:
            return None
        placed = [_at(entries, time_s) for entries in present.values()]
        comparable = [p for p in placed if p is not None and len(p[0]) == len(record.sketch)]
        if len(comparable) < 2:
            return None
        self._last_s = time_s
        return time_s, drift([p[0] for p in comparable], [p[1] for p in comparable])

    def _present(self) -> Mapping[Rank, deque[EvaluationRecord]]:
        """Replicas that still evaluate: not silent for as long as another's memory reaches."""
        full = [r[0].time_s for r in self._recent.values() if len(r) == _LONGEST_WAIT]
        oldest_s = min(full, default=-np.inf)
        return {rank: r for rank, r in self._recent.items() if r[-1].time_s >= oldest_s}


def _size_differs(one: EvaluationRecord, other: EvaluationRecord) -> bool:
    return len(one.sketch) != len(other.sketch)


def _at(
    entries: Sequence[EvaluationRecord], time_s: float
) -> tuple[NDArray[np.float64], float] | None:
    """(sketch, norm) of one replica at that time; None when it had not evaluated by then."""
    later = next((i for i, entry in enumerate(entries) if entry.time_s >= time_s), None)
    if later is None or (later == 0 and entries[0].time_s > time_s):
        return None
    after = entries[later]
    before = entries[later - 1] if later else after
    span_s = after.time_s - before.time_s
    share = (time_s - before.time_s) / span_s if span_s > 0 else 1.0
    sketch_S = (1 - share) * np.asarray(before.sketch) + share * np.asarray(after.sketch)
    return sketch_S, (1 - share) * before.weights_norm + share * after.weights_norm

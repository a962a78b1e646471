"""Random slowdowns of a worker: the environment's stragglers.

The draws depend on the job's seed and the worker's rank. Each straggler of the file takes one draw
per step, whether it is active or not. So other policies in the same environment get the same slow
steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dlion_api.names import Rank
from dlion_environments.plan import Straggler

_STREAM = 0x57A6
"""Separates these draws from others with the same seed."""


class StragglerModel:
    """Slowdowns of one worker."""

    def __init__(self, stragglers: Iterable[Straggler], *, seed: int, rank: Rank) -> None:
        self._own = [straggler for straggler in stragglers if rank in straggler.ranks]
        self._random = np.random.default_rng([_STREAM, seed, rank])

    def next_slowdown(self, now_s: float) -> float:
        """Factor on the core seconds of the step that begins now."""
        draws = self._random.random(len(self._own))
        return math.prod(
            straggler.slowdown
            for straggler, draw in zip(self._own, draws, strict=True)
            if draw < straggler.chance and straggler.begins_s <= now_s < straggler.ends_s
        )

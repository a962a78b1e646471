"""How much slower than its cores a worker is just now: the environment's stragglers.

Owns the chance, which follows the job's seed and the worker's rank: one draw for each straggler of
the file at each step, whether it counts just then or not, so that another policy in the same
environment meets the same slow steps. Called by `worker` when a step begins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlion_api.names import Rank
    from dlion_worker.environments.plan import Straggler

_STREAM = 0x57A6
"""Keeps these draws apart from all others of the same seed."""


class Pace:
    """One worker's."""

    def __init__(self, stragglers: Iterable[Straggler], *, seed: int, rank: Rank) -> None:
        self._own = [straggler for straggler in stragglers if rank in straggler.ranks]
        self._chance = np.random.default_rng([_STREAM, seed, rank])

    def next_slowdown(self, now_s: float) -> float:
        """Times the usual core seconds, for the step that begins now."""
        draws = self._chance.random(len(self._own))
        return math.prod(
            straggler.slowdown
            for straggler, draw in zip(self._own, draws, strict=True)
            if draw < straggler.chance and straggler.begins_s <= now_s < straggler.ends_s
        )

"""Exponential backoff with jitter."""

import random
from collections.abc import Callable
from typing import Final

INITIAL_S = 0.2
MAX_S = 5.0
JITTER: Final = random.SystemRandom()
"""Random numbers for the times of retries and renewals.

Python's global generator belongs to the user's program: if one of these threads drew from it while
the model is built, the worker would get other initial weights than its peers.
"""


class Backoff:
    """Doubling waits with jitter, so that the workers of a site do not retry together."""

    def __init__(
        self,
        random_fraction: Callable[[], float] = JITTER.random,
        *,
        initial_s: float = INITIAL_S,
        max_s: float = MAX_S,
    ) -> None:
        """`random_fraction` returns numbers in [0, 1)."""
        self._random_fraction = random_fraction
        self._initial_s, self._max_s = initial_s, max_s
        self._next_s = initial_s

    def next_s(self) -> float:
        """Seconds to wait now: half to all of the current step, which then doubles up to the
        longest."""
        step_s = self._next_s
        self._next_s = min(self._max_s, 2 * step_s)
        return step_s * (0.5 + 0.5 * self._random_fraction())

    def reset(self) -> None:
        self._next_s = self._initial_s

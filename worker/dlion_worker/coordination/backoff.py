"""How long to wait before the next attempt. Pure: chance is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_S = 0.2
LONGEST_S = 5.0


class Backoff:
    """Doubling waits with jitter, so that the workers of a site do not all come back at once."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """`chance` yields numbers in [0, 1)."""
        self._chance = chance
        self._next_s = FIRST_S

    def next_s(self) -> float:
        """Seconds to wait now: half to all of the current step, which then doubles up to 5 s."""
        step_s = self._next_s
        self._next_s = min(LONGEST_S, 2 * step_s)
        return step_s * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """An attempt succeeded: the next failure waits briefly again."""
        self._next_s = FIRST_S

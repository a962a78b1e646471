"""How many local steps a round has, and how many entries a worker sends at its end.

Called by `adaptive`. One objective decides, the predicted progress per second. With H local steps,
a part p of the entries sent, and times in local steps, t of the transfer and l of the latency there
and back, it is

    H e(H) g(p) / (H + t + l),   e(H) = 1 / (1 + a (H - 1)),   g(p) = p^b.

e: how much a sample is worth less because workers diverge during a round. g: how much is lost
because only the largest entries travel at once. a and b are rough: with them H is 4 or 8 in the
environments hetero-sys-a and two-clouds-hetero, where 4 was the best fixed H. t is limited to a
part of H, as all wait for the transfer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dlion_core.codecs import coded_bytes, max_kept_entries

if TYPE_CHECKING:
    from dlion_core.codecs import Coding
    from dlion_core.policies.interface import BudgetsChanged
    from dlion_core.policies.parameters import AdaptiveParameters

MAX_LOCAL_STEPS = 64

STEP_LOSS = 0.03
"""a: by how much each further local step makes a sample worth less."""

DENSITY_EXPONENT = 0.12
"""b: how progress depends on the part of the entries that travels."""

_CHOICES = (1, 2, 4, 8, 16, 32, MAX_LOCAL_STEPS)


class RoundPlanner:
    """Chooses H and the number of entries from the measured links of one worker."""

    def __init__(
        self,
        parameters: AdaptiveParameters,
        *,
        size: int,
        coding: Coding,
        bandwidth_fraction: float = 1.0,
    ) -> None:
        """`bandwidth_fraction`: the part of a link's rate that its budget is."""
        self._parameters, self._size, self._coding = parameters, size, coding
        self._fraction = bandwidth_fraction
        self._share = min(parameters.transfer_share, bandwidth_fraction)

    def count(self, links: BudgetsChanged, local_steps: int) -> int:
        """Return how many entries to send after that many steps; at least one."""
        if self._parameters.density is not None:
            return max(1, int(self._parameters.density * self._size))
        rate = self._bytes_per_step(links)
        if rate is None:
            return self._size
        room = int(self._share * local_steps * rate)
        least = max(1, int(self._parameters.min_density * self._size))
        return max(least, max_kept_entries(room, self._size, self._coding))

    def local_steps(self, links: BudgetsChanged) -> int:
        """Return the H with the greatest predicted progress per second."""
        if self._parameters.local_steps is not None:
            return self._parameters.local_steps
        return max(_CHOICES, key=lambda steps: self._progress(links, steps))

    def _progress(self, links: BudgetsChanged, steps: int) -> float:
        count, rate = self.count(links, steps), self._bytes_per_step(links)
        transfer = 0.0 if rate is None else coded_bytes(count, self._size, self._coding) / rate
        latency = 2 * max(links.delay_steps.values(), default=0.0)
        worth = math.pow(count / self._size, DENSITY_EXPONENT) / (1 + STEP_LOSS * (steps - 1))
        return steps * worth / (steps + transfer + latency)

    def _bytes_per_step(self, links: BudgetsChanged) -> float | None:
        """What the narrowest link carries during a step; None if no link's rate is known."""
        narrowest = min(links.budget_bytes.values(), default=None)
        return None if narrowest is None else max(1, narrowest) / self._fraction

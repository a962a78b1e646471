"""How many local steps a round has, and how many entries a worker sends at its end.

Called by `adaptive`. One objective decides, the predicted progress per second. With H local steps,
a part p of the entries sent, and times in local steps, t of the transfer and l of the latency there
and back, it is

    H e(H) g(H / p) / (H + t + l + c),   e(H) = 1 / (1 + a (H - 1)),   g(x) = 1 / (1 + x / b).

e: how much a sample is worth less because workers diverge during a round. g: how much it is worth
less because a change waits x = H / p steps in the mean until it travels. c: what a round costs
beside that. a, b and c are rough: with them H is 2 in the environment hetero-sys-a and 4 in
two-clouds-hetero, the best of those tried there (docs/decisions/0029). t is limited to a part of
H, as all wait for the transfer.
"""

from dlion_core.codecs import Coding, coded_bytes, max_kept_entries
from dlion_core.policies.interface import BudgetsChanged
from dlion_core.policies.round_parameters import AdaptiveParameters

MAX_LOCAL_STEPS = 64

STEP_LOSS = 0.03
"""a: by how much each further local step makes a sample worth less."""

DELAY_STEPS = 1000
"""b: after how many steps a change that travels is worth half."""

ROUND_COST_STEPS = 0.1
"""c: to wait for the slowest worker and to make the outer step."""

MIN_GAIN = 0.01
"""A change of H has to promise more than that."""

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

    def local_steps(self, links: BudgetsChanged, current: int) -> int:
        """Return the H with the greatest predicted progress per second. It is the current one while
        no other is better by `MIN_GAIN`: measured rates vary."""
        if self._parameters.local_steps is not None:
            return self._parameters.local_steps
        best = max(_CHOICES, key=lambda steps: self._progress(links, steps))
        gain = self._progress(links, best) / self._progress(links, current)
        return best if gain > 1 + MIN_GAIN else current

    def explanation(self, links: BudgetsChanged, local_steps: int) -> str:
        """Say what a round of that many steps sends and is expected to be worth here."""
        count, rate = self.count(links, local_steps), self._bytes_per_step(links)
        text = f"rounds of {local_steps} local steps; this worker sends {count / self._size:.2%} of"
        text += (
            f" the entries, predicted speed {self._progress(links, local_steps):.0%} of no exchange"
        )
        if rate is None:
            return f"{text}; no link is measured yet"
        peer = min(links.budget_bytes, key=links.budget_bytes.__getitem__)
        return f"{text}; its narrowest link, to worker {peer}, carries {rate:,.0f} bytes in a step"

    def _progress(self, links: BudgetsChanged, steps: int) -> float:
        count, rate = self.count(links, steps), self._bytes_per_step(links)
        transfer = 0.0 if rate is None else coded_bytes(count, self._size, self._coding) / rate
        latency = 2 * max(links.delay_steps.values(), default=0.0)
        delay = 1 + steps * self._size / count / DELAY_STEPS
        worth = 1 / delay / (1 + STEP_LOSS * (steps - 1))
        return steps * worth / (steps + transfer + latency + ROUND_COST_STEPS)

    def _bytes_per_step(self, links: BudgetsChanged) -> float | None:
        """What the narrowest link carries during a step; None if no link's rate is known."""
        narrowest = min(links.budget_bytes.values(), default=None)
        return None if narrowest is None else max(1, narrowest) / self._fraction

"""How long a step takes in virtual time: a + b x batch, plus the exchange, times a slowdown.

`quota_cores / core_scale` relative units compute that many times `samples_per_s_per_core`. The
fixed part scales in the same way.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from dlion_api.names import Rank
from dlion_api.protocol.measurements import PhaseSeconds
from dlion_environments.plan import Straggler

_EXCHANGE_SHARES = PhaseSeconds(
    select_s=0.29, encode_s=0.24, send_s=0.01, decode_s=0.32, apply_s=0.14
)
"""How a step's exchange cost divides among its phases: as measured with policy `dlion` and four
workers (benchmarks/phase_cost.py). Other policies divide it otherwise; the sum is what is
calibrated."""

_STREAM = 0x57A6
"""Separates the draws of slowdowns from others with the same seed."""


@dataclass(frozen=True)
class StepCosts:
    """Core seconds of one local step on one relative unit of compute."""

    per_sample_core_s: float
    fixed_core_s: float = 0.0
    exchange_core_s: float = 0.0
    """Per step, to select, encode, send, receive, decode and add. Sidecars do not count it as
    computing."""
    exchange_core_s_per_byte: float = 0.0
    """Additional cost of each byte sent or received; 0 if unknown."""

    def core_s(self, batch_size: int) -> float:
        """Core seconds of computing `batch_size` samples."""
        return self.fixed_core_s + batch_size * self.per_sample_core_s

    def exchange_s(self, exchanged_bytes: int) -> float:
        """Core seconds of a step's exchange."""
        return self.exchange_core_s + exchanged_bytes * self.exchange_core_s_per_byte

    def step_core_s(self, batch_size: int, exchanged_bytes: int) -> float:
        """Core seconds of a whole step."""
        return self.core_s(batch_size) + self.exchange_s(exchanged_bytes)

    def computing_fraction(self, batch_size: int, exchanged_bytes: int) -> float:
        """Fraction of a step's time and CPU spent on computing."""
        return self.core_s(batch_size) / self.step_core_s(batch_size, exchanged_bytes)


def exchange_phases(exchange_s: float) -> PhaseSeconds:
    """The phases of a step whose exchange took that many seconds of the worker's time.

    >>> round(exchange_phases(2.0).main_s, 9)
    2.0
    """
    shares = asdict(_EXCHANGE_SHARES)
    return PhaseSeconds(**{phase: share * exchange_s for phase, share in shares.items()})


class StragglerModel:
    """Random slowdowns of one worker: the environment's stragglers.

    The draws depend on the job's seed and the worker's rank. Each straggler of the file takes one
    draw per step, whether it is active or not. So other policies in the same environment get the
    same slow steps.
    """

    def __init__(self, stragglers: Iterable[Straggler], *, seed: int, rank: Rank) -> None:
        self._own = [straggler for straggler in stragglers if rank in straggler.ranks]
        self._rng = np.random.default_rng([_STREAM, seed, rank])

    def next_slowdown(self, now_s: float) -> float:
        """Factor on the core seconds of the step that begins now."""
        if not self._own:
            return 1.0
        draws = self._rng.random(len(self._own))
        return math.prod(
            straggler.slowdown
            for straggler, draw in zip(self._own, draws, strict=True)
            if draw < straggler.chance and straggler.begins_s <= now_s < straggler.ends_s
        )

"""The cost model of a step in virtual time: a + b x batch, plus the exchange, per core.

`quota_cores / core_scale` relative units compute that many times `samples_per_s_per_core`. The
fixed part scales in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass


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

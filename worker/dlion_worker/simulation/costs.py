"""What a step costs in virtual time: a + b x batch, and its exchange's part, per core.

Owns that law and nothing else. `quota_cores / core_scale` relative units of an environment compute
as many times `samples_per_s_per_core`; the fixed part is shared out in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """Core seconds of one local step on one relative unit of compute."""

    per_sample_core_s: float
    fixed_core_s: float = 0.0
    exchange_core_s: float = 0.0
    """Of each step, for select, encode, send, receive, decode and add: no computing, so that no
    sidecar counts it as such."""
    exchange_core_s_per_byte: float = 0.0
    """Of each byte sent or received, beside that; 0: not known."""

    def core_s(self, batch_size: int) -> float:
        """Core seconds of computing, over so many samples."""
        return self.fixed_core_s + batch_size * self.per_sample_core_s

    def exchange_s(self, exchanged_bytes: int) -> float:
        """Core seconds of a step's exchange, of so many bytes."""
        return self.exchange_core_s + exchanged_bytes * self.exchange_core_s_per_byte

    def step_core_s(self, batch_size: int, exchanged_bytes: int) -> float:
        """Of both."""
        return self.core_s(batch_size) + self.exchange_s(exchanged_bytes)

    def computing_fraction(self, batch_size: int, exchanged_bytes: int) -> float:
        """Of a step's time and CPU, what is computing."""
        return self.core_s(batch_size) / self.step_core_s(batch_size, exchanged_bytes)

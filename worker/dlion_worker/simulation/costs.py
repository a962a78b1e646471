"""What computing costs in virtual time: a + b x batch, per core.

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

    def core_s(self, batch_size: int) -> float:
        """Core seconds of a step over so many samples."""
        return self.fixed_core_s + batch_size * self.per_sample_core_s

"""The step that a server makes with the changes of its workers: SGD with delayed Nesterov momentum.

With rate r, momentum m and period N, each change's gradient g moves the weights by r g at once. The
velocity follows after each N-th, from the mean of the N:

    v <- m v + mean(g);  additional step r N m v

So stale changes do not build up in the velocity one by one. With N of 1 it is Nesterov's momentum,
as in DiLoCo. Source: Liu et al., "Asynchronous Local-SGD training for language modeling", 2024, as
in the code of HALoS's authors (momentum activation c = 0).
"""

from collections.abc import Mapping

import numpy as np

from dlion_core.policies.interface import Flat, Value
from dlion_core.policies.state_values import vector_or_none


class DelayedNesterov:
    """The optimizer of one server."""

    def __init__(self, rate: float, momentum: float, period: int = 1) -> None:
        self._rate, self._momentum = np.float32(rate), np.float32(momentum)
        self._period = period
        self._velocity_D: Flat | None = None
        self._sum_D: Flat | None = None
        self._count = 0

    def step(self, gradient_D: Flat) -> Flat:
        """Return what to subtract from the weights."""
        step_D: Flat = self._rate * gradient_D
        if not self._momentum:
            return step_D
        self._sum_D = gradient_D.copy() if self._sum_D is None else self._sum_D + gradient_D
        self._count += 1
        if self._count == self._period:
            mean_D = self._sum_D / np.float32(self._period)
            carried_D = 0 if self._velocity_D is None else self._momentum * self._velocity_D
            self._velocity_D = mean_D + carried_D
            step_D += self._rate * np.float32(self._period) * self._momentum * self._velocity_D
            self._sum_D, self._count = None, 0
        return step_D

    def state(self, prefix: str) -> dict[str, Value]:
        state: dict[str, Value] = {f"{prefix}count": self._count}
        for name, vector_D in (("velocity_D", self._velocity_D), ("sum_D", self._sum_D)):
            if vector_D is not None:
                state[prefix + name] = vector_D.copy()
        return state

    def restore(self, state: Mapping[str, Value], prefix: str) -> None:
        self._count = int(state[f"{prefix}count"])
        self._velocity_D = vector_or_none(state, f"{prefix}velocity_D")
        self._sum_D = vector_or_none(state, f"{prefix}sum_D")

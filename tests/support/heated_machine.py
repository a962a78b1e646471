"""A machine in the exact solution of C dT/dt = P - (T - A) / R, driven by a heat controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dlion_core.heat.heat_controller import SAMPLE_S, HeatController, HeatDecision


@dataclass(frozen=True)
class HeatedMachine:
    """`rise_k` is that of full load above idle, in kelvin; ambient includes the heat of idling."""

    time_constant_s: float
    rise_k: float
    ambient: Callable[[float], float] = lambda _: 30.0

    def driven(
        self,
        controller: HeatController,
        *,
        seconds: float,
        sensor: Callable[[float, float], float | None] = lambda _time, celsius: celsius,
    ) -> list[tuple[float, HeatDecision]]:
        """Return true temperatures and decisions, one pair for each sample; the worker uses its
        share."""
        celsius, share = self.ambient(0.0), 0.0
        kept = math.exp(-SAMPLE_S / self.time_constant_s)
        pairs = []
        for step in range(int(seconds / SAMPLE_S)):
            now_s = step * SAMPLE_S
            steady = self.ambient(now_s) + self.rise_k * share
            celsius = steady + (celsius - steady) * kept
            decision = controller.sample(now_s, sensor(now_s, celsius), share)
            pairs.append((celsius, decision))
            share = decision.share
        return pairs

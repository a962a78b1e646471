"""A simulated worker's machine: its temperature, its throttle, and the job's heat budget.

The worker advances its time at the end of each step and rest, and whenever a sample is due or the
hardware throttles while it computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_core.heat.heat_controller import SAMPLE_S, HeatController
from dlion_simulator.machines.thermal import ThermalMachine

if TYPE_CHECKING:
    from dlion_api.spec.node_policies import Heat
    from dlion_environments.plan import Thermals

_EARLY_S = 1e-9
"""Virtual time is in whole nanoseconds: an event may come that much early."""


class MachineHeat:
    """One for all incarnations of a worker: a restart does not cool its machine."""

    def __init__(self, thermals: Thermals, budget: Heat | None) -> None:
        """Without a budget only the hardware's throttle acts."""
        self._machine, self._budget = ThermalMachine(thermals), budget
        self._controller: HeatController | None = None
        if budget is not None:
            self._controller = HeatController(budget.threshold_celsius, budget.min_compute_share)
        self.share = self.mean_share = 1.0
        """Share of the time in which the worker may compute; without its noise."""
        self._now_s = self._sampled_s = 0.0
        self._busy_s = 0.0
        """Computed since the last sample."""
        self._highest_celsius = self._machine.celsius
        self._above_s = self._throttled_s = self._share_s = 0.0

    @property
    def speed(self) -> float:
        """Share of the machine's speed that its throttle leaves."""
        return self._machine.speed

    @property
    def _next_sample_s(self) -> float:
        return self._sampled_s + SAMPLE_S

    def next_event_s(self) -> float:
        """Time until which share and speed stay while the worker computes; inf: always."""
        event_s = self._machine.next_event_s(1.0)
        return event_s if self._controller is None else min(event_s, self._next_sample_s)

    def advance(self, to_s: float, *, is_busy: bool) -> None:
        """Advance to `to_s`. `is_busy`: whether the worker computed since the last call."""
        load = float(is_busy)
        while self._now_s < to_s:
            until_s = min(to_s, self._machine.next_event_s(load), self._next_sample_s)
            passed_s = until_s - self._now_s
            self._throttled_s += passed_s * (self._machine.speed < 1.0)
            self._share_s += passed_s * self.share
            self._machine.advance(until_s, load)
            self._busy_s += passed_s * load
            self._now_s = until_s
            self._count_above(passed_s)
            if until_s >= self._next_sample_s - _EARLY_S:
                self._sample(until_s)

    def _sample(self, now_s: float) -> None:
        used = min(1.0, self._busy_s / (now_s - self._sampled_s))
        self._sampled_s, self._busy_s = now_s, 0.0
        if self._controller is not None:
            decision = self._controller.sample(now_s, self._machine.celsius, used)
            self.share, self.mean_share = decision.share, decision.mean_share

    def _count_above(self, passed_s: float) -> None:
        celsius = self._machine.celsius
        self._highest_celsius = max(self._highest_celsius, celsius)
        if self._budget is not None and celsius > self._budget.threshold_celsius:
            self._above_s += passed_s

    def summary(self) -> str:
        """What became of the machine until now, in one line."""
        total_s = max(self._now_s, _EARLY_S)
        text = f"hottest {self._highest_celsius:.1f} °C, now {self._machine.celsius:.1f} °C"
        text += f"; throttled by the hardware for {self._throttled_s / total_s:.1%} of the time"
        if self._budget is not None:
            text += (
                f"; above {self._budget.threshold_celsius:g} °C for {self._above_s / total_s:.1%}"
                f" of the time; the heat budget left {self._share_s / total_s:.0%} of compute"
            )
        return text

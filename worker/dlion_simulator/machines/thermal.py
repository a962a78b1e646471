"""The temperature of a simulated machine: the exact solution of its first-order equation.

Ambient temperature, load and throttling are constant between events, so nothing is integrated
numerically, and the instants at which the hardware throttles are exact.
"""

import math

from dlion_environments.plan import Thermals

INFINITY = math.inf
_CLOSE_K = 1e-9
"""Closer to a threshold than this counts as reached: a time in whole nanoseconds falls short."""


class ThermalMachine:
    """Follows the temperature of one machine; its time never decreases."""

    def __init__(self, thermals: Thermals) -> None:
        """It starts at the temperature that it has when idle."""
        self._thermals = thermals
        self._now_s = 0.0
        self._ambient_index = 0
        self._update_ambient()  # the environment may change it at once
        self.celsius = self._ambient_celsius + thermals.idle_watts * thermals.kelvin_per_watt
        self.is_throttled = False
        self._update_throttle()

    @property
    def speed(self) -> float:
        """Share of the machine's speed that its throttle leaves."""
        throttle = self._thermals.throttle
        return throttle.speed if throttle is not None and self.is_throttled else 1.0

    def advance(self, to_s: float, load: float) -> None:
        """Advance to `to_s` with that load, the share of time that the processor is busy."""
        while self._now_s < to_s:
            until_s = min(to_s, self.next_event_s(load))
            steady, cooling = self._steady(load), 1.0 / self._time_constant_s
            kept = math.exp(-cooling * (until_s - self._now_s))
            self.celsius = steady + (self.celsius - steady) * kept
            self._now_s = until_s
            self._update_ambient()
            self._update_throttle()

    def next_event_s(self, load: float) -> float:
        """When the ambient temperature changes or the throttle acts, with that load; inf: never."""
        ambient, next_index = self._thermals.ambient, self._ambient_index + 1
        change_s = ambient[next_index][0] if next_index < len(ambient) else INFINITY
        return min(self._throttle_event_s(load), change_s)

    def _throttle_event_s(self, load: float) -> float:
        throttle = self._thermals.throttle
        if throttle is None:
            return INFINITY
        goal = throttle.resume_celsius if self.is_throttled else throttle.trip_celsius
        steady = self._steady(load)
        if (steady - goal) * (-1 if self.is_throttled else 1) <= 0:
            return INFINITY
        ratio = (self.celsius - steady) / (goal - steady)
        # A nanosecond more, so that the goal is passed and not only approached.
        return self._now_s + self._time_constant_s * math.log(max(ratio, 1.0)) + 1e-9

    def _update_throttle(self) -> None:
        throttle = self._thermals.throttle
        if throttle is None:
            return
        if self.celsius >= throttle.trip_celsius - _CLOSE_K:
            self.is_throttled = True
        elif self.celsius <= throttle.resume_celsius + _CLOSE_K:
            self.is_throttled = False

    @property
    def _time_constant_s(self) -> float:
        return self._thermals.joules_per_kelvin * self._thermals.kelvin_per_watt

    def _steady(self, load: float) -> float:
        thermals, throttle = self._thermals, self._thermals.throttle
        power = throttle.power if throttle is not None and self.is_throttled else 1.0
        watts = thermals.idle_watts + (thermals.busy_watts - thermals.idle_watts) * load * power
        return self._ambient_celsius + watts * thermals.kelvin_per_watt

    @property
    def _ambient_celsius(self) -> float:
        return self._thermals.ambient[self._ambient_index][1]

    def _update_ambient(self) -> None:
        ambient = self._thermals.ambient
        while self._ambient_index + 1 < len(ambient):
            if ambient[self._ambient_index + 1][0] > self._now_s:
                return
            self._ambient_index += 1

"""Machines, workloads and air temperatures of `heat.py`, with exact or numerical solutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dlion_environments.plan import HardwareThrottle, Thermals
from dlion_simulator.machines.thermal import ThermalMachine


@dataclass(frozen=True)
class Machine:
    """Heat capacity and resistance of a machine; `die` is that of a die on top of it, if any."""

    joules_per_kelvin: float
    kelvin_per_watt: float
    idle_watts: float
    busy_watts: float
    speed: float = 0.5
    """Speed under the hardware's throttle, and its power above idle."""
    power: float = 0.5
    die: tuple[float, float] | None = None


MACHINES = {
    "board": Machine(30, 8, 2, 7.5, speed=0.3, power=0.3),
    "board, DVFS": Machine(30, 8, 2, 7.5, speed=0.5, power=0.3),
    "box": Machine(400, 2.2, 6, 28, speed=0.25, power=0.25),
    "bare": Machine(8, 12, 1.5, 6, speed=0.15, power=0.15),
    "die on case": Machine(250, 2.4, 5, 25, speed=0.25, power=0.25, die=(6, 0.6)),
}
"""Invented, in the range of single boards and fanless boxes: time constants of 96 to 880 s."""

AMBIENTS: dict[str, Callable[[float], float]] = {
    "cool": lambda _: 22.0,
    "warm": lambda _: 35.0,
    "hot": lambda _: 45.0,
    "day": lambda t: 33.0 + 12.0 * math.sin(2 * math.pi * t / 5400),
    "door": lambda t: 45.0 if t % 2400 < 1200 else 28.0,
    "sun": lambda t: 25.0 + 20.0 * min(1.0, max(0.0, (t - 600) / 1800)),
}


@dataclass(frozen=True)
class Workload:
    """Steps of a worker: seconds of work and of waits, and the load of other processes."""

    step_s: float
    wait_s: float = 0.0
    pause_every_s: float = math.inf
    pause_s: float = 0.0
    other: Callable[[float], float] = lambda _: 0.0


WORKLOADS = {
    "steps of 1 s": Workload(1.0),
    "steps of 8 s": Workload(8.0),
    "waits": Workload(1.5, 0.4),
    "pauses": Workload(1.0, 0.0, pause_every_s=300, pause_s=45),
    "other load": Workload(1.0, 0.0, other=lambda t: 0.15 if t % 900 > 450 else 0.0),
}

Trace = tuple[str, str, str]

TUNING: tuple[Trace, ...] = (
    ("board", "steps of 1 s", "warm"),
    ("board, DVFS", "waits", "day"),
    ("box", "steps of 8 s", "hot"),
    ("bare", "pauses", "warm"),
    ("die on case", "steps of 1 s", "door"),
    ("box", "other load", "sun"),
    ("bare", "steps of 1 s", "door"),
)
HELD_OUT: tuple[Trace, ...] = (
    ("board", "steps of 8 s", "door"),
    ("board, DVFS", "steps of 1 s", "sun"),
    ("box", "pauses", "warm"),
    ("bare", "waits", "day"),
    ("die on case", "other load", "hot"),
    ("board", "other load", "hot"),
    ("box", "steps of 1 s", "day"),
    # Added after the parameters were final.
    ("box", "steps of 8 s", "sun"),
    ("die on case", "waits", "day"),
    ("bare", "steps of 8 s", "warm"),
    ("board, DVFS", "pauses", "hot"),
    ("die on case", "pauses", "door"),
)


class Truth(Protocol):
    """A machine in virtual time."""

    @property
    def celsius(self) -> float: ...
    @property
    def speed(self) -> float: ...
    def advance(self, to_s: float, load: float) -> None: ...


class DieOnCase:
    """A small die whose heat flows to a case and from there to the air, by Euler's method."""

    def __init__(self, machine: Machine, ambient: Callable[[float], float], trip: float) -> None:
        assert machine.die is not None
        self._trip = trip
        self._machine, self._ambient = machine, ambient
        self._capacity, self._resistance = machine.die
        idle = machine.idle_watts
        self._case = ambient(0.0) + idle * machine.kelvin_per_watt
        self.celsius = self._case + idle * self._resistance
        self._now_s, self._throttled = 0.0, False

    @property
    def speed(self) -> float:
        return self._machine.speed if self._throttled else 1.0

    def advance(self, to_s: float, load: float) -> None:
        machine, step_s = self._machine, 0.125
        while self._now_s < to_s - 1e-9:
            share = load * (machine.power if self._throttled else 1.0)
            watts = machine.idle_watts + (machine.busy_watts - machine.idle_watts) * share
            flow = (self.celsius - self._case) / self._resistance
            out = (self._case - self._ambient(self._now_s)) / machine.kelvin_per_watt
            self.celsius += step_s * (watts - flow) / self._capacity
            self._case += step_s * (flow - out) / machine.joules_per_kelvin
            self._now_s += step_s
            if self.celsius >= self._trip:
                self._throttled = True
            elif self.celsius <= self._trip - 5:
                self._throttled = False


def truth(
    machine: Machine, ambient: Callable[[float], float], seconds: float, trip: float
) -> Truth:
    """Return the machine of a trace; the ambient temperature changes every ten seconds."""
    if machine.die is not None:
        return DieOnCase(machine, ambient, trip)
    points = tuple((float(t), ambient(float(t))) for t in range(0, int(seconds), 10))
    throttle = HardwareThrottle(trip, trip - 5, machine.speed, machine.power)
    return ThermalMachine(
        Thermals(
            machine.joules_per_kelvin, machine.kelvin_per_watt, machine.idle_watts,
            machine.busy_watts, points, throttle,
        )
    )  # fmt: skip

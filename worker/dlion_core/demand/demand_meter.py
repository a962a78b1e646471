"""Measures how many cores other work takes from a worker's machine. Pure: counters are given."""

import math
from dataclasses import dataclass

from dlion_api.protocol.measurements import StepTiming

CONTENDED_FRACTION = 0.9
"""A step that got less than this part of the cores that the trainer uses alone was held up."""

QUIET_FRACTION = 0.02
"""Fraction of the time in which some task waited for a processor. Below it no task slows
another."""

RISE_FRACTION, FALL_FRACTION = 0.3, 0.002
"""How fast the cores that the trainer uses alone follow a larger and a smaller reading: steps with
other work beside them show less, and no step shows more."""

MAX_GAP_S = 60.0
"""A longer time without a step shows nothing of the time between."""


@dataclass(frozen=True)
class MachineCpu:
    """Counters of a whole machine at one moment, in seconds since it started."""

    cores: float
    """Processors of the machine."""
    busy_s: float
    """Time that its processors worked, for whomever, or were withheld by its hypervisor."""
    own_s: float = 0.0
    """CPU time of the sidecar itself."""
    pressure_s: float | None = None
    """Time that some task waited for a processor; None: the kernel does not count it."""


@dataclass(frozen=True)
class TakenCores:
    """What other work took in one interval."""

    cores: float
    """Cores that others used, 0 to those of the machine."""
    machine_cores: float
    wanted_cores: float
    """Cores that the trainer uses while nothing holds it up."""
    seconds: float


def cores_left(taken: float, machine_cores: float, wanted_cores: float) -> float:
    """Cores that a trainer gets beside others that take `taken`, in units of cores."""
    return min(wanted_cores, max(machine_cores - taken, 0.0))


class DemandMeter:
    """Measures from step to step, so that the trainer's own CPU time is known exactly.

    While the trainer computes and is held up, others take what it does not get. That is exact in
    steps, also for a trainer that waits for peers and leaves its cores to others meanwhile.
    Otherwise the machine's counters decide: they show demand that does not hurt yet. Without them
    only the former is known, and the machine counts as large as the trainer's own use.

    Source: this project.
    """

    def __init__(self) -> None:
        self._wanted = math.nan
        self._quota: float | None = None
        self._last: MachineCpu | None = None
        self._began_s = math.nan
        self._restart()

    def _restart(self) -> None:
        self._cpu_s = self._compute_s = self._compute_cpu_s = 0.0

    def trainer_started(self) -> None:
        """Forget the open interval: a new process has used CPU time that no step reports."""
        self._began_s = math.nan
        self._restart()

    def set_quota(self, cores: float | None) -> bool:
        """Set the trainer's CPU quota; return whether it is another one. Then the trainer uses
        another number of cores, and earlier readings no longer show what is left of them."""
        if cores == self._quota:
            return False
        self._quota, self._wanted = cores, math.nan
        self.trainer_started()
        return True

    def add(self, step: StepTiming) -> None:
        """Add a step of the open interval."""
        times = (step.compute_s, step.cpu_s, step.wall_s)
        if step.quota_changed or not all(math.isfinite(each) and each >= 0 for each in times):
            return
        compute_cpu_s = step.cpu_s if step.compute_cpu_s is None else step.compute_cpu_s
        self._cpu_s += step.cpu_s
        if step.compute_s > 0 and math.isfinite(compute_cpu_s) and compute_cpu_s >= 0:
            self._compute_s += step.compute_s
            self._compute_cpu_s += compute_cpu_s

    def take(self, now_s: float, machine: MachineCpu | None) -> TakenCores | None:
        """End the interval at the end of a step; None if it shows nothing.

        `machine` is None where the machine's counters cannot be read.
        """
        before, self._last = self._last, machine
        began_s, self._began_s = self._began_s, now_s
        cpu_s, compute_s, compute_cpu_s = self._cpu_s, self._compute_s, self._compute_cpu_s
        self._restart()
        seconds = now_s - began_s
        if not 0.0 < seconds <= MAX_GAP_S or compute_s <= 0.0:  # false for NaN as well
            return None
        got = self._limited(compute_cpu_s / compute_s)
        if not math.isfinite(got):  # of a time that is next to nothing
            return None
        if math.isnan(self._wanted):
            self._wanted = got
        used = _used_by_others(before, machine, cpu_s, seconds)
        if machine is None:
            self._follow(got)
            taken = max(0.0, self._wanted - got)
            return TakenCores(taken, self._wanted, self._wanted, seconds)
        if used is None:  # a reading of the steps alone would be on another scale
            self._follow(got)
            return None
        cores = max(machine.cores, self._wanted)
        if _is_quiet(before, machine, seconds):
            self._wanted = max(got, self._wanted)
            used = min(used, cores - self._wanted)
        elif got < CONTENDED_FRACTION * self._wanted:
            used = cores - got
        self._follow(got)
        return TakenCores(min(max(used, 0.0), cores), cores, self._wanted, seconds)

    def _limited(self, got: float) -> float:
        return got if self._quota is None else min(got, self._quota)

    def _follow(self, got: float) -> None:
        change = got - self._wanted
        self._wanted += (RISE_FRACTION if change > 0 else FALL_FRACTION) * change


def _used_by_others(
    before: MachineCpu | None, now: MachineCpu | None, trainer_s: float, seconds: float
) -> float | None:
    """Cores that neither trainer nor sidecar used; None if the counters do not show it."""
    if before is None or now is None or now.cores != before.cores:
        return None
    busy_s, own_s = now.busy_s - before.busy_s, now.own_s - before.own_s
    # Counters go back after a migration, and no machine works for longer than its cores can.
    if not (0.0 <= busy_s <= 1.5 * now.cores * seconds + 0.1 and own_s >= 0.0):
        return None
    return max(0.0, (busy_s - trainer_s - own_s) / seconds)


def _is_quiet(before: MachineCpu | None, now: MachineCpu, seconds: float) -> bool:
    """Whether next to no task waited for a processor, if that is known."""
    if before is None or before.pressure_s is None or now.pressure_s is None:
        return False
    return 0.0 <= now.pressure_s - before.pressure_s < QUIET_FRACTION * seconds

"""Reads the machine's temperature and keeps to the job's heat budget.

`dlion_core.heat` decides; this reads, measures how busy the trainer is, and logs what changes.
"""

import logging
from pathlib import Path

from dlion_api.protocol.measurements import StepTiming
from dlion_api.spec.node_policies import Heat
from dlion_core.heat.duty_cycle import BusyTime
from dlion_core.heat.heat_controller import HeatController, HeatDecision, HeatState
from dlion_worker.sidecar.node_facts import read_frequency, read_temperature

_LOG = logging.getLogger(__name__)


class HeatBudget:
    """One worker's heat budget. Not thread-safe."""

    def __init__(self, policy: Heat, root: Path) -> None:
        """`root` is the folder with the machine's `sys` and `proc`."""
        self._policy, self._root = policy, root
        self._controller = HeatController(policy.threshold_celsius, policy.min_compute_share)
        self._busy = BusyTime()
        self._sampled_s: float | None = None
        self.decision = HeatDecision(1.0, HeatState.UNKNOWN)
        """The last one."""

    def add_step(self, step: StepTiming) -> None:
        """Add a step of the trainer: all of it counts as computing but its waits for peers."""
        waited_s = step.wall_s - step.compute_s if step.waited_s is None else step.waited_s
        self._busy.add(step.wall_s - waited_s)

    def sample(self, now_s: float) -> HeatDecision:
        """Read the temperature and decide; called about every `SAMPLE_S`."""
        is_first = self._sampled_s is None
        passed_s = 0.0 if self._sampled_s is None else now_s - self._sampled_s
        self._sampled_s = now_s
        celsius = read_temperature(self._root)
        if is_first:
            self._log_unreadable(celsius)
        before = self.decision
        self.decision = self._controller.sample(now_s, celsius, self._busy.share(passed_s))
        if self.decision.state is not before.state:
            self._log_change(before.state)
        return self.decision

    def _log_unreadable(self, celsius: float | None) -> None:
        """Say once what cannot be read."""
        if celsius is None:
            _LOG.warning(
                "heat budget: no temperature in %s; compute is not limited. Does this machine have"
                " a sensor, and may its pods read /sys?",
                self._root / "sys/class/{thermal/thermal_zone*/temp,hwmon/hwmon*/temp*_input}",
            )
        if read_frequency(self._root) is None:
            _LOG.info("heat budget: the CPU frequency cannot be read; it is not needed")

    def _log_change(self, before: HeatState) -> None:
        threshold = self._policy.threshold_celsius
        match self.decision.state:
            case HeatState.LIMITED:
                _LOG.info("heat budget: limits compute to stay below %g °C", threshold)
            case HeatState.BLIND:
                _LOG.warning(
                    "heat budget: the temperature is missing, frozen or absurd; compute falls to"
                    " %.0f %%",
                    100 * self._policy.min_compute_share,
                )
            case HeatState.FREE if before is not HeatState.UNKNOWN:
                _LOG.info("heat budget: compute is not limited any more")

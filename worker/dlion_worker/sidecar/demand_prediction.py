"""Reads what other work takes from the machine's processors, and predicts the worker's speed.

`dlion_core.demand` decides; this reads the kernel's counters and logs what changes.
"""

import logging
import os
import re
import time
from pathlib import Path

from dlion_api.protocol.measurements import CpuAllowance, StepTiming
from dlion_core.demand.demand_meter import MachineCpu
from dlion_core.demand.demand_predictor import DemandDecision, DemandPredictor, DemandState

_LOG = logging.getLogger(__name__)

_COUNTED = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, irq, softirq and steal. Guests count as user."""


class DemandPrediction:
    """One worker's forecasts. Not thread-safe."""

    def __init__(self, root: Path) -> None:
        """`root` is the folder with the machine's `proc`."""
        self._root = root
        self._predictor = DemandPredictor()
        self._has_read = False
        self.is_blind = False
        """Whether the machine's counters could not be read last time."""

    @property
    def decision(self) -> DemandDecision:
        """The last one."""
        return self._predictor.decision

    def trainer_started(self) -> None:
        """A trainer connected, the first or a restarted one."""
        self._predictor.trainer_started()

    def set_allowance(self, allowance: CpuAllowance) -> None:
        """Set the trainer's CPU quota."""
        self._predictor.set_quota(allowance.quota_cores)

    def add_step(
        self, step: StepTiming, now_s: float, measured_samples_per_s: float | None
    ) -> DemandDecision | None:
        """Add a step that ended just now; return a new decision if one was due.

        `measured_samples_per_s` is the speed that counts without forecasts; None: unknown.
        """
        self._predictor.add_step(step, now_s, measured_samples_per_s)
        if not self._predictor.is_due(now_s):
            return None
        machine = read_machine_cpu(self._root)
        self.is_blind = machine is None
        if not self._has_read:
            self._log_unreadable(machine)
        before = self.decision.state
        decision = self._predictor.sample(now_s, machine, measured_samples_per_s)
        if decision.state is not before:
            self._log_change(before)
        return decision

    def _log_unreadable(self, machine: MachineCpu | None) -> None:
        """Say once what cannot be read."""
        self._has_read = True
        if machine is None:
            _LOG.info(
                "demand: %s cannot be read; only what holds up the trainer's own steps is known",
                self._root / "proc/stat",
            )
        elif machine.pressure_s is None:
            _LOG.info(
                "demand: %s cannot be read; it is not needed", self._root / "proc/pressure/cpu"
            )

    def _log_change(self, before: DemandState) -> None:
        match self.decision.state:
            case DemandState.PREDICTED:
                _LOG.info("demand: forecasts of other work have been better, and count from now on")
            case DemandState.MEASURED if before is DemandState.PREDICTED:
                _LOG.info("demand: forecasts of other work have been wrong; measured speed counts")


def read_machine_cpu(root: Path = Path("/")) -> MachineCpu | None:
    """The machine's counters; None if they are missing or not as Linux writes them."""
    try:
        with (root / "proc/stat").open() as file:
            lines = [line for line in iter(file.readline, "") if line.startswith("cpu")]
    except (OSError, UnicodeDecodeError):
        return None
    if not lines or not re.fullmatch(r"cpu(\s+\d{1,20}){8,}\s*", lines[0]) or len(lines) < 2:
        return None
    ticks = [int(word) for word in lines[0].split()[1:]]
    return MachineCpu(
        cores=float(len(lines) - 1),
        busy_s=sum(ticks[column] for column in _COUNTED) / os.sysconf("SC_CLK_TCK"),
        own_s=time.process_time(),
        pressure_s=_pressure_s(root),
    )


def _pressure_s(root: Path) -> float | None:
    try:
        text = (root / "proc/pressure/cpu").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^some .*total=(\d{1,20})$", text, re.MULTILINE)
    return int(match[1]) / 1e6 if match else None

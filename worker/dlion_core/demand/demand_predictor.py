"""Predicts how fast a worker will compute, and decides whether to use that. Pure: time is an
argument."""

import math
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeGuard

from dlion_api.protocol.measurements import StepTiming
from dlion_api.spec import Spec
from dlion_core.demand.demand_meter import (
    MAX_GAP_S,
    DemandMeter,
    MachineCpu,
    TakenCores,
    cores_left,
)
from dlion_core.demand.forecaster import DemandForecaster

SAMPLE_S = 1.0
"""Interval between readings; longer if steps are longer."""

EFFICIENCY_S = 20.0
"""Time constant of the average of samples per CPU second."""

DEAD_BAND = 0.05
"""Forecasts that differ by less change nothing: single steps vary as much."""

UNDER_COST = 0.5
"""Cost of a speed that was too low, relative to one that was too high by the same factor. All
others wait for a worker that is slower than expected; one that is faster waits alone."""

CREDIT_S = 1.0
"""Seconds of waiting that forecasts must have saved before they are used."""
MAX_CREDIT_S = 12.0
CREDIT_MEMORY_S = 240.0
"""Time constant with which savings and losses are forgotten."""
MAX_RAISED = 16.0
RAISED_MEMORY_S = 1200.0
"""The required credit doubles whenever forecasts have used it up, at most to `MAX_RAISED` times
`CREDIT_S`. Half of the excess decays in `RAISED_MEMORY_S`."""

MIN_LEFT_FRACTION = 0.05
"""Minimum fraction of the trainer's cores that a forecast leaves to it."""


class DemandState(StrEnum):
    """The basis of the worker's published speed."""

    UNKNOWN = "Unknown"  # nothing read yet
    MEASURED = "Measured"  # forecasts have not been better than the measured speed
    PREDICTED = "Predicted"


@dataclass(frozen=True)
class DemandDecision:
    """The speed to publish, and its basis."""

    samples_per_s: float | None = None
    """None: the measured speed."""
    state: DemandState = DemandState.UNKNOWN
    taken_cores: float | None = None
    """Cores that other work takes now; None: unknown."""
    expected_cores: float | None = None
    """Cores that other work is expected to take in the next steps."""
    machine_cores: float | None = None
    rule: str = ""
    """The rule of the forecast."""

    def reason(self) -> str:
        """Return the reason for a directive.

        >>> decision = DemandDecision(90.0, DemandState.PREDICTED, 0.1, 2.0, 4.0, "level")
        >>> decision.reason()
        'other work is expected to take 2.0 of 4 cores, now 0.1 (level)'
        """
        if self.samples_per_s is None or self.expected_cores is None:
            return ""
        return (
            f"other work is expected to take {self.expected_cores:.1f} of {self.machine_cores:g}"
            f" cores, now {self.taken_cores:.1f} ({self.rule})"
        )


@dataclass(frozen=True)
class _Forecast:
    made_s: float
    predicted: float
    """The speed as published: the measured one if they differ little."""
    measured: float
    differs: bool


class DemandPredictor:
    """Turns a forecast of what others take into a forecast of the worker's speed.

    Speed is the number of remaining cores times the samples per CPU second. It replaces the
    measured speed while forecasts have been better. Each forecast is compared with the speed of the
    following steps, whether it was used or not. The savings, in seconds of waiting, are a credit.
    Once the credit is used up, the measured speed is used again, and twice the credit is required.
    So a worker loses at most the credit, however others behave.

    Source: this project. The goal is that of EdgeBalance, of which only the title and the claim are
    known.
    """

    def __init__(self) -> None:
        self._meter, self._forecaster = DemandMeter(), DemandForecaster()
        self._samples = self._cpu_s = 0.0
        self._iteration_s = 0.0
        self._sampled_s = -math.inf
        self._cells = 0.0
        self._taken: TakenCores | None = None
        self._is_of_other_quota = False
        """Whether that reading is from before the last change of the trainer's quota."""
        self._predicted: float | None = None
        self._made: deque[_Forecast] = deque(maxlen=64)
        self._credit_s, self._demanded = 0.0, 1.0
        self._counts = False
        self.decision = DemandDecision()
        """The last one."""

    def trainer_started(self) -> None:
        """A trainer connected, the first or a restarted one."""
        self._meter.trainer_started()
        self._made.clear()

    def set_quota(self, cores: float | None) -> None:
        """Set the trainer's CPU quota; None: there is none. After a change nothing is predicted
        until the next reading."""
        if self._meter.set_quota(cores):
            self._is_of_other_quota, self._predicted = True, None
            self._made.clear()

    def is_due(self, now_s: float) -> bool:
        """Whether the next step's end is to be sampled."""
        return now_s - self._sampled_s >= SAMPLE_S

    def add_step(
        self, step: StepTiming, now_s: float, measured_samples_per_s: float | None
    ) -> None:
        """Add a step that ends now, before a sample of the same moment. `measured_samples_per_s`
        is the speed that counts without forecasts, after this step; None: unknown."""
        self._meter.add(step)
        if step.quota_changed or not (0.0 < step.compute_s < math.inf and step.samples > 0):
            return
        cpu_s = step.cpu_s if step.compute_cpu_s is None else step.compute_cpu_s
        if not (0.0 < cpu_s < math.inf and 0.0 <= step.wall_s < math.inf):
            return
        kept = math.exp(-step.compute_s / EFFICIENCY_S)
        self._samples = kept * self._samples + step.samples
        self._cpu_s = kept * self._cpu_s + cpu_s
        wall_s = max(step.wall_s, step.compute_s)
        self._iteration_s += (wall_s - self._iteration_s) * (0.3 if self._iteration_s else 1.0)
        self._judge(step.samples / step.compute_s, step.compute_s, now_s - wall_s)
        self._note(now_s, measured_samples_per_s)

    def sample(
        self, now_s: float, machine: MachineCpu | None, measured_samples_per_s: float | None
    ) -> DemandDecision:
        """Decide, at the end of a step. `measured_samples_per_s` is the speed that counts without
        forecasts; None: unknown."""
        passed_s = now_s - self._sampled_s
        self._sampled_s = now_s
        taken = self._meter.take(now_s, machine)
        if taken is not None:
            self._taken, self._is_of_other_quota = taken, False
        elif not 0.0 < passed_s <= MAX_GAP_S:
            self._forecaster, self._cells = DemandForecaster(), 0.0
            self._taken = self._predicted = None
        if self._taken is not None:  # without a reading the last one stays, so that cycles do
            self._add(self._taken.cores, passed_s if taken is None else taken.seconds)
        self.decision = self._decide(now_s, measured_samples_per_s)
        return self.decision

    def _add(self, cores: float, seconds: float) -> None:
        """Add a reading for each second of its interval."""
        self._cells += seconds / SAMPLE_S
        for _ in range(min(round(self._cells), int(MAX_GAP_S))):
            self._forecaster.add(cores)
            self._cells -= 1.0

    def _decide(self, now_s: float, measured: float | None) -> DemandDecision:
        taken = self._taken
        if taken is None or self._is_of_other_quota:
            return DemandDecision()
        if not _is_speed(measured) or self._cpu_s <= 0.0:
            return DemandDecision()
        # A decision holds until the next sample, and counts for the steps that begin until then.
        horizon_s = max(SAMPLE_S, self._iteration_s) + 0.5 * self._iteration_s
        try:
            expected, rule = self._forecaster.forecast(math.ceil(horizon_s / SAMPLE_S))
        except ValueError:  # the interval was shorter than half a reading
            return DemandDecision()
        expected = min(max(expected, 0.0), taken.machine_cores)
        left = cores_left(expected, taken.machine_cores, taken.wanted_cores)
        left = max(left, MIN_LEFT_FRACTION * taken.wanted_cores)
        self._predicted = left * self._samples / self._cpu_s
        noted = self._note(now_s, measured)
        follows = self._counts and noted is not None and noted.differs
        return DemandDecision(
            samples_per_s=self._predicted if follows else None,
            state=DemandState.PREDICTED if self._counts else DemandState.MEASURED,
            taken_cores=taken.cores,
            expected_cores=expected,
            machine_cores=taken.machine_cores,
            rule=rule,
        )

    def _note(self, now_s: float, measured: float | None) -> _Forecast | None:
        """Record both speeds for the next steps. Return None if one is unknown."""
        if not (_is_speed(measured) and _is_speed(self._predicted)):
            return None
        differs = abs(math.log(self._predicted / measured)) >= DEAD_BAND
        noted = _Forecast(now_s, self._predicted if differs else measured, measured, differs)
        self._made.append(noted)
        return noted

    def _judge(self, came: float, compute_s: float, began_s: float) -> None:
        """Compare a step with the forecast that applied when it began."""
        made: _Forecast | None = None
        while self._made and self._made[0].made_s <= began_s + 1e-6:
            made = self._made.popleft()
        if made is None:
            return
        self._made.appendleft(made)
        saved_s = compute_s * (_cost(made.measured / came) - _cost(made.predicted / came))
        kept = math.exp(-compute_s / CREDIT_MEMORY_S)
        max_s = max(MAX_CREDIT_S, CREDIT_S * self._demanded)
        self._credit_s = min(kept * self._credit_s + saved_s, max_s)
        self._demanded = 1.0 + (self._demanded - 1.0) * 0.5 ** (compute_s / RAISED_MEMORY_S)
        if self._counts and self._credit_s <= 0.0:
            self._counts, self._credit_s = False, 0.0
            self._demanded = min(2.0 * self._demanded, MAX_RAISED)
        elif not self._counts:
            self._credit_s = max(self._credit_s, -CREDIT_S)
            self._counts = self._credit_s >= CREDIT_S * self._demanded


def predicts_demand(spec: Spec) -> bool:
    """Whether a job's sidecars predict: where shares are even, no share follows a speed."""
    return spec.node_policies.demand.prediction == "auto" and spec.batching.policy != "even"


def _is_speed(samples_per_s: float | None) -> TypeGuard[float]:
    return samples_per_s is not None and 0.0 < samples_per_s < math.inf


def _cost(ratio: float) -> float:
    """Waiting for a step, in units of its time, with `ratio` times its true speed expected.

    >>> _cost(1.0), _cost(1.5), _cost(0.5)
    (0.0, 0.5, 0.25)
    """
    return ratio - 1.0 if ratio > 1.0 else UNDER_COST * (1.0 - ratio)

"""A worker in lock step beside other load, in closed form, driven by a demand predictor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dlion_api.protocol.measurements import StepTiming
from dlion_core.demand.demand_meter import MachineCpu
from dlion_core.demand.demand_predictor import DemandDecision, DemandPredictor

CORES = 4.0
SAMPLE_CORE_S = 0.02
STEP_S, WAIT_S = 0.5, 0.1


@dataclass
class SteppedWorker:
    """Computes for half a second and waits for a tenth, whatever its progress. Other load takes its
    demand, at most half of the cores while the worker computes."""

    wanted: Callable[[float], float]
    predictor: DemandPredictor = field(default_factory=DemandPredictor)
    now_s: float = 0.0
    busy_s: float = 0.0

    def left(self, now_s: float) -> float:
        return max(CORES - self.wanted(now_s), CORES / 2)

    def steps(
        self,
        seconds: float,
        *,
        has_counters: bool = True,
        measured: Callable[[float, float], float] = lambda _before, now: now,
    ) -> Iterator[tuple[float, float, DemandDecision]]:
        """The time and the true samples per second of each step, and the decision behind it.

        `measured` computes the measured speed from the true speeds of this step and the last.
        """
        before, end_s = self.left(self.now_s) / SAMPLE_CORE_S, self.now_s + seconds
        iteration = 0
        while self.now_s < end_s:
            iteration += 1
            left, wanted = self.left(self.now_s), self.wanted(self.now_s)
            speed, cpu_s = left / SAMPLE_CORE_S, left * STEP_S
            step = StepTiming(
                iteration, round(speed * STEP_S), STEP_S, STEP_S + WAIT_S, cpu_s, cpu_s, WAIT_S
            )
            self.busy_s += cpu_s + min(wanted, CORES - left) * STEP_S + min(wanted, CORES) * WAIT_S
            self.now_s += STEP_S + WAIT_S
            known = measured(before, speed)
            self.predictor.add_step(step, self.now_s, known)
            if self.predictor.is_due(self.now_s):
                counters = MachineCpu(CORES, self.busy_s) if has_counters else None
                self.predictor.sample(self.now_s, counters, known)
            yield self.now_s, speed, self.predictor.decision
            before = speed


def square(period_s: float, busy_s: float, cores: float) -> Callable[[float], float]:
    """Other load takes `cores` in the last `busy_s` of each period."""
    return lambda now_s: cores if now_s % period_s >= period_s - busy_s else 0.0

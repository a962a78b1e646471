"""A simulated worker beside other work: its machine, and the forecasts of its sidecar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_core.demand.demand_predictor import DemandPredictor, DemandState, predicts_demand
from dlion_simulator.machines.shared_machine import SharedMachine

if TYPE_CHECKING:
    from dlion_api.names import Rank
    from dlion_api.protocol.measurements import StepTiming
    from dlion_api.spec import Job
    from dlion_core.resource_control.resource_controller import ResourceController
    from dlion_environments.plan import CoLocatedDemand, Plan


class WorkerDemand:
    """One for all incarnations of a worker: a restart does not change what others do."""

    def __init__(self, demand: CoLocatedDemand, *, predicts: bool) -> None:
        """`predicts`: whether the job's sidecars predict what others take."""
        self.machine = SharedMachine(demand)
        self._predictor = DemandPredictor() if predicts else None
        self._steps = self._predicted_steps = 0

    def trainer_started(self) -> None:
        """A new incarnation of the worker."""
        if self._predictor is not None:
            self._predictor.trainer_started()

    def end_step(
        self, step: StepTiming, director: ResourceController, now_s: float, units: float
    ) -> None:
        """Report a step that the director has handled, as a sidecar does."""
        self._steps += 1
        self.machine.advance(now_s, units, is_busy=False)
        if (predictor := self._predictor) is None:
            return
        measured = director.measured_samples_per_s()
        predictor.add_step(step, now_s, measured)
        if predictor.is_due(now_s):
            decision = predictor.sample(now_s, self.machine.counters(units), measured)
            director.set_expected_speed(decision.samples_per_s, decision.reason(), now_s)
        self._predicted_steps += predictor.decision.state is DemandState.PREDICTED

    def summary(self) -> str:
        """What became of it until now, in one line."""
        text = self.machine.summary()
        if self._predictor is not None:
            share = self._predicted_steps / max(self._steps, 1)
            text += f"; forecasts counted for {share:.0%} of the steps"
        return text


def worker_demands(job: Job, plan: Plan) -> dict[Rank, WorkerDemand]:
    """One for each worker whose machine has other work in the environment."""
    predicts = predicts_demand(job.spec)
    return {rank: WorkerDemand(each, predicts=predicts) for rank, each in plan.demands.items()}

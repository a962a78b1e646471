"""The parts of a simulated worker, and what it needs of the run.

`run` creates both; `worker` uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dlion_worker.training.datasets import training_set_size_is_known

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from dlion_api.names import Rank
    from dlion_api.protocol.measurements import Capacity
    from dlion_api.spec import Job
    from dlion_core.lifecycle.reporting import Reporter
    from dlion_core.policies.iteration_guard import IterationGuard
    from dlion_core.resource_control.resource_controller import ResourceController
    from dlion_simulator.clock import VirtualClock
    from dlion_simulator.costs import StepCosts
    from dlion_simulator.links import VirtualLink
    from dlion_simulator.stragglers import StragglerModel
    from dlion_simulator.worker import VirtualWorker
    from dlion_worker.training.datasets import BatchStream
    from dlion_worker.training.replica import LocalReplica


class WorkerPhase(Enum):
    """What a worker is doing."""

    ENTERING = auto()
    COMPUTING = auto()
    HELD = auto()
    STOPPED = auto()
    GONE = auto()


@dataclass
class WorkerParts:
    """The parts of one simulated worker."""

    job: Job
    rank: Rank
    replica: LocalReplica
    stream: BatchStream
    machine: IterationGuard
    director: ResourceController
    reporter: Reporter
    training_set_samples: int
    costs: StepCosts
    straggler_model: StragglerModel
    units: float
    """Relative compute: core seconds of the cost model per virtual second."""
    links: dict[Rank, VirtualLink] = field(default_factory=dict)

    def counted_training_samples(self) -> int:
        """Size of the training set, as a trainer counts it
        (`trainer.background.background_tasks`)."""
        if training_set_size_is_known(self.job):
            return self.training_set_samples
        directive = self.director.directive
        return 0 if directive is None else directive.training_set_samples


class SimulationContext:
    """What a worker needs of the run that it takes part in."""

    def __init__(
        self,
        clock: VirtualClock,
        executor: Executor,
        *,
        publish_capacity: Callable[[Rank, Capacity], None],
        probe_links: Callable[[Rank], None],
        set_neighbours: Callable[[Rank, frozenset[Rank]], None],
        step_finished: Callable[[VirtualWorker], None],
        on_stop: Callable[[Rank, str], None],
        rejoin: Callable[[Rank], None],
    ) -> None:
        """Set the callbacks.

        `publish_capacity` sends a capacity to the peers. `probe_links` probes links that are due.
        `set_neighbours` changes a worker's neighbours. `step_finished` follows each iteration.
        `on_stop` ends the run when a stop condition is met. `rejoin` lets a worker join again that
        was paused while others trained.
        """
        self.clock, self.executor = clock, executor
        self.publish_capacity, self.probe_links, self.set_neighbours = (
            publish_capacity,
            probe_links,
            set_neighbours,
        )
        self.step_finished, self.on_stop, self.rejoin = step_finished, on_stop, rejoin

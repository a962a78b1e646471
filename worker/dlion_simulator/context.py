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
    from dlion_simulator.costs import StepCosts, StragglerModel
    from dlion_simulator.links import VirtualLink
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


@dataclass(frozen=True)
class SimulationContext:
    """What a worker needs of the run that it takes part in."""

    clock: VirtualClock
    executor: Executor
    publish_capacity: Callable[[Rank, Capacity], None]
    """Sends a worker's capacity to its peers."""
    probe_links: Callable[[Rank], None]
    """Probes a worker's links that are due."""
    set_neighbours: Callable[[Rank, frozenset[Rank]], None]
    step_finished: Callable[[VirtualWorker], None]
    """Follows each iteration."""
    on_stop: Callable[[Rank, str], None]
    """Ends the run when a worker meets a stop condition."""
    rejoin: Callable[[Rank], None]
    """Lets a worker join again that was paused while others trained."""

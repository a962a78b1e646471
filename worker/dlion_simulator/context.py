"""The parts of a simulated worker, and what it needs of the run.

`run` creates both; `worker` uses them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dlion_core.lifecycle.stopping import JobProgress
from dlion_core.links.link_budget import equalize_similar
from dlion_worker.training.datasets import training_set_size_is_known

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from dlion_api.names import Rank
    from dlion_api.protocol.measurements import Capacity, Directive
    from dlion_api.spec import Job
    from dlion_core.lifecycle.reporting import Reporter
    from dlion_core.policies.iteration_guard import IterationGuard
    from dlion_core.resource_control.resource_controller import ResourceController
    from dlion_simulator.clock import VirtualClock
    from dlion_simulator.costs import StepCosts, StragglerModel
    from dlion_simulator.links import VirtualLink
    from dlion_simulator.machines.demand import WorkerDemand
    from dlion_simulator.machines.heat import MachineHeat
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
    heat: MachineHeat | None = None
    """None: its temperature is not simulated."""
    demand: WorkerDemand | None = None
    """None: no other work runs on its machine."""
    links: dict[Rank, VirtualLink] = field(default_factory=dict)

    @property
    def quota_cores(self) -> float | None:
        """Its CPU quota. A machine that it shares limits it by what others take, not by a quota."""
        return self.units if self.demand is None else None

    def speed(self, now_s: float) -> float:
        """Units of compute that other work and the hardware's throttle leave at that time."""
        left = self.units
        if self.demand is not None:
            left = self.demand.machine.left(now_s, self.units)
        return left if self.heat is None else left * self.heat.speed

    def next_change_s(self, now_s: float) -> float:
        """Time until which the speed stays while the worker computes; inf: always."""
        change_s = math.inf if self.heat is None else self.heat.next_event_s()
        if self.demand is None:
            return change_s
        return min(change_s, self.demand.machine.next_change_s(now_s))

    def counted_training_samples(self) -> int:
        """Size of the training set, as a trainer counts it
        (`trainer.background.background_tasks`)."""
        if training_set_size_is_known(self.job):
            return self.training_set_samples
        directive = self.director.directive
        return 0 if directive is None else directive.training_set_samples


@dataclass(frozen=True)
class SimulatedLinks:
    """The worker's links and sidecar, as the steps use them."""

    parts: WorkerParts

    def latest_directive(self) -> Directive | None:
        return self.parts.director.directive

    def set_budgets(self, directive: Directive) -> None:
        for peer, link in self.parts.links.items():
            link.set_budget(directive.budget_bytes.get(peer))

    def sendable_bytes(self) -> Mapping[Rank, int]:
        sizes = {peer: link.sendable_bytes() for peer, link in self.parts.links.items()}
        return equalize_similar({peer: size for peer, size in sizes.items() if size is not None})

    def one_way_delays_s(self) -> Mapping[Rank, float]:
        return {peer: link.latency_s for peer, link in self.parts.links.items()}

    def set_iteration(self, iteration: int) -> None:
        """Peers read it from the worker's progress."""


@dataclass(frozen=True)
class ProgressUndo:
    """Undoes the progress of a step; in virtual time no checkpoint needs more."""

    progress: JobProgress
    before: JobProgress = field(default_factory=JobProgress)

    def begin_step(self) -> None:
        self.before.take(self.progress)

    def end_step(self) -> None: ...

    def undo_step(self) -> None:
        self.progress.take(self.before)


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

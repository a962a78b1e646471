"""What one virtual worker is put together from, and what it asks of the run around it.

Called by `run`, which makes both, and by `worker`. Next to no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dlion_worker.training.datasets import whole_is_known

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from dlion_api.measurements import Capacity
    from dlion_api.names import Rank
    from dlion_api.spec import Job
    from dlion_worker.policies.horizon import Horizon
    from dlion_worker.sidecar.director import Director
    from dlion_worker.simulation.clock import VirtualClock
    from dlion_worker.simulation.costs import StepCosts
    from dlion_worker.simulation.links import VirtualLink
    from dlion_worker.simulation.pace import Pace
    from dlion_worker.simulation.worker import VirtualWorker
    from dlion_worker.trainer.replica import LocalReplica
    from dlion_worker.trainer.reporting import Reporter
    from dlion_worker.training.datasets import BatchStream


class Phase(Enum):
    """Where a worker stands."""

    ENTERING = auto()
    COMPUTING = auto()
    HELD = auto()
    STOPPED = auto()
    GONE = auto()


@dataclass
class WorkerParts:
    """What one virtual worker is put together from."""

    job: Job
    rank: Rank
    replica: LocalReplica
    stream: BatchStream
    machine: Horizon
    director: Director
    reporter: Reporter
    training_set_samples: int
    costs: StepCosts
    pace: Pace
    units: float
    """Relative compute: how many core seconds of the costs a second brings."""
    links: dict[Rank, VirtualLink] = field(default_factory=dict)

    def whole_set(self) -> int:
        """The training set's samples as a trainer counts them (`trainer.companions`)."""
        if whole_is_known(self.job):
            return self.training_set_samples
        directive = self.director.directive
        return 0 if directive is None else directive.training_set_samples


class Surroundings:
    """What a worker asks of the run it takes part in."""

    def __init__(
        self,
        clock: VirtualClock,
        executor: Executor,
        *,
        told: Callable[[Rank, Capacity], None],
        measured: Callable[[Rank], None],
        regrouped: Callable[[Rank, frozenset[Rank]], None],
        stepped: Callable[[VirtualWorker], None],
        stopped: Callable[[Rank, str], None],
        behind: Callable[[Rank], None],
    ) -> None:
        """`told`: a capacity for the peers. `measured`: where groups go by what links carry, it is
        time to probe some. `regrouped`: a worker's neighbours are those from now on. `stepped`: an
        iteration is over. `stopped`: a stop condition is met. `behind`: others have trained while a
        worker held still, and it is to come in anew."""
        self.clock, self.executor = clock, executor
        self.told, self.measured, self.regrouped = told, measured, regrouped
        self.stepped, self.stopped, self.behind = stepped, stopped, behind

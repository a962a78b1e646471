"""The global batch of one sidecar: by which rule it changes, and where it continues. Pure.

Called by `ResourceController`. The rules themselves are in `batching` and `goodput`.
"""

import math

from dlion_api.names import Rank
from dlion_api.protocol.measurements import BatchChoice
from dlion_api.spec import Job
from dlion_core.resource_control.batching import GlobalBatchController
from dlion_core.resource_control.capacity_table import CapacityTable, PublishedCapacities
from dlion_core.resource_control.goodput import GoodputController, noise_scale


class GlobalBatch:
    """The samples of all workers in the next iteration."""

    def __init__(self, job: Job, rank: Rank, capacities: CapacityTable) -> None:
        growth, self._capacities = job.spec.global_batch_size, capacities
        self._controller = GlobalBatchController(growth)
        self._goodput: GoodputController | None = None
        if job.spec.batching.policy == "goodput":
            self._goodput = GoodputController(growth, rank)
        self._iteration = 0
        """The last one of this worker, in this run or in the checkpoint; 0: unknown."""
        self._has_stepped = False
        """Whether this sidecar knows of a step of this worker."""
        self._is_resumed = False
        """Whether the size is that of a checkpoint or of an earlier sidecar."""

    @property
    def choice(self) -> BatchChoice | None:
        """The choice to send to other sidecars; None: there is none."""
        return None if self._goodput is None else self._goodput.held

    def take_choice(self, choice: BatchChoice | None) -> bool:
        """Take another sidecar's choice; return whether it replaces the local one."""
        return self._goodput is not None and choice is not None and self._goodput.take(choice)

    def step_done(self, iteration: int) -> None:
        self._iteration, self._has_stepped = iteration, True

    def resume(self, size: int) -> None:
        """Continue with the size of an earlier sidecar's last directive."""
        self._is_resumed = True
        (self._goodput or self._controller).resume(size)

    def resume_at(self, iteration: int, size: int) -> None:
        """Continue from a checkpoint: this worker's last iteration, and the size then; 0: unknown.

        It has no effect after a step of this worker, which is newer. After an earlier sidecar's
        directive only the iteration is news, and so it is after a peer's state was adopted.
        """
        if self._has_stepped or not iteration:
            return
        self._iteration = iteration
        if self._is_resumed or not size:
            return
        self._is_resumed = True
        if self._goodput is None:
            self._controller.resume(size)
        else:
            self._goodput.resume(size, iteration)

    def next_size(self, published: PublishedCapacities, training_set_samples: int) -> int:
        """The size of the next iteration. All inputs but the list of active workers are published,
        so sidecars with the same list agree (see `ActiveWorkers.set_membership`).

        `training_set_samples` counts where no worker has published its number.
        """
        following = self._iteration + 1
        if self._goodput is not None:
            return self._goodput.at(
                following,
                scale=noise_scale(self._capacities.gradient_noises(published.active)),
                samples_per_s=math.fsum(published.capacities.values()),
                fixed_s=self._capacities.exchange_s(published.active),
            )
        samples = published.training_set_samples or training_set_samples
        return self._controller.at(following, samples)

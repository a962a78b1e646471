"""Measures this worker's speed before its first step and waits for the peers' speeds.

Computes gradients of real batches and discards them. Without it workers begin with equal batches,
and the slowest delays the first iterations. `worker` calls it when all begin together; the sidecar
interprets the result.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dlion_api.names import Rank
from dlion_api.protocol.measurements import SpeedProbe
from dlion_api.spec import Job
from dlion_worker.trainer.background.quota_watch import QuotaWatch
from dlion_worker.trainer.loop import TrainerComponents
from dlion_worker.trainer.process_times import logged_first_trace
from dlion_worker.training.datasets import BatchStream, training_set_size_is_known
from dlion_worker.training.model import FlatModel

FIRST_SAMPLES = 8
GROWTH = 4
TARGET_STEP_S = 0.4
"""Target duration of a batch: several periods of a CFS quota, and long enough that a step's fixed
costs weigh as in training."""

MIN_MEASURED_S = 1.5
"""Minimum time of measured steps; more than the sidecar needs for a rate
(`resource_control.capacity`)."""

MAX_PROBE_S = 3.0
"""No further step begins after this time."""

MAX_EQUAL_SHARES = 2
"""A batch never exceeds this many equal shares: a larger one may not fit in memory."""

WAIT_S = 5.0
"""Longest wait for the peers' speeds after the own probe; they probe at the same time."""

SLICE_S = 0.02


@contextmanager
def preserved_state(model: FlatModel, stream: BatchStream) -> Iterator[None]:
    """Restore model state, random generators and data position on exit."""
    state, counters, position = model.get_state(), model.get_counters(), stream.state()
    try:
        yield
    finally:
        model.set_state(state)
        model.set_counters(counters)
        stream.restore(position)


def compile_functions(model: FlatModel, stream: BatchStream) -> None:
    """Compile step and evaluation now, so that the first iteration takes no longer than others."""
    with logged_first_trace(), preserved_state(model, stream):
        x_B, y_B = stream.next(FIRST_SAMPLES)
        model.step(x_B, y_B)
        model.evaluate(x_B, y_B)


@dataclass
class _Timing:
    samples: int = 0
    compute_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0

    def add(self, samples: int, compute_s: float, cpu_s: float) -> None:
        self.samples += samples
        self.compute_s += compute_s
        self.cpu_s += cpu_s
        self.steps += 1


class SpeedProber:
    """One time-limited measurement. `run` returns it, or None if it was stopped early."""

    def __init__(
        self,
        step: Callable[[int], None],
        *,
        max_samples: int,
        quota: QuotaWatch,
        other_cpu_s: Callable[[], float],
        stopped: Callable[[], bool],
        wall_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        """`step` computes the gradient of that many samples. `other_cpu_s`: the process's CPU time
        spent on other work."""
        self._step, self._max_samples = step, max_samples
        self._quota, self._other_cpu_s, self._stopped = quota, other_cpu_s, stopped
        self._wall_s, self._cpu_s = wall_s, cpu_s

    def run(self) -> SpeedProbe | None:
        """Grow batches until one takes `TARGET_STEP_S`, then measure steps of that size.

        The first step of a size does not count, because it allocates memory. Steps before a quota
        change do not count either.
        """
        samples = largest = min(FIRST_SAMPLES, self._max_samples)
        began_s, throttled_s = self._wall_s(), self._quota.throttled_s()
        counted, fallback, is_first = _Timing(), _Timing(), True
        while not self._is_over(began_s, counted) and not self._stopped():
            one = self._timed(samples)
            if self._quota.changed():
                counted, throttled_s = _Timing(), self._quota.throttled_s()
                continue
            wanted = min(self._max_samples, int(samples * TARGET_STEP_S / one.compute_s))
            if wanted > 1.5 * samples:
                samples, is_first = min(wanted, GROWTH * samples), True
                largest, fallback = max(largest, samples), one
            elif is_first:
                is_first, fallback, throttled_s = False, one, self._quota.throttled_s()
            else:
                counted.add(one.samples, one.compute_s, one.cpu_s)
        measured = counted if counted.steps else fallback
        if not measured.steps:
            return None
        return SpeedProbe(
            samples=measured.samples,
            compute_s=measured.compute_s,
            cpu_s=max(0.0, measured.cpu_s),
            throttled_s=max(0.0, self._quota.throttled_s() - throttled_s),
            quota_cores=self._quota.cores,
            largest_batch=largest,
        )

    def _is_over(self, began_s: float, counted: _Timing) -> bool:
        if counted.steps > 1 and counted.compute_s >= MIN_MEASURED_S:
            return True
        return self._wall_s() - began_s >= MAX_PROBE_S

    def _timed(self, samples: int) -> _Timing:
        wall_s, cpu_s, other_cpu_s = self._wall_s(), self._cpu_s(), self._other_cpu_s()
        self._step(samples)
        used_s = (self._cpu_s() - cpu_s) - (self._other_cpu_s() - other_cpu_s)
        return _Timing(samples, max(1e-9, self._wall_s() - wall_s), used_s, 1)


def measure_and_share_speed(
    parts: TrainerComponents, external_stop: Callable[[], str | None]
) -> None:
    """Measure this worker's speed and wait (bounded) until its sidecar knows all speeds.

    Does nothing if the speeds have no effect, or are known already, as after a restart. Ends early
    if the run is over, or `external_stop` gives a reason.
    """
    job, rank, inbox, stream = parts.job, parts.rank, parts.inbox, parts.stream

    def stopped() -> bool:
        return bool(inbox.stop_reason or external_stop())

    def known(ranks: set[Rank]) -> bool:
        directive = parts.sidecar.latest_directive()
        return directive is not None and ranks <= directive.capacities.keys()

    if not _speeds_matter(job) or not inbox.linked or known({rank}):
        return

    # peers may pull the real model's state
    twin = parts.replica.model.sibling(seed=job.spec.trainer.seed, rank=rank)

    def step(samples: int) -> None:
        twin.step(*stream.next(samples))

    batch = job.spec.batching.global_batch_size.initial
    with preserved_state(twin, stream):
        probe = SpeedProber(
            step,
            max_samples=max(1, min(batch, MAX_EQUAL_SHARES * batch // len(job.workers()))),
            quota=QuotaWatch(),
            other_cpu_s=parts.exchange.cpu_s,
            stopped=stopped,
        ).run()
    if probe is None:
        return
    parts.sidecar.send(probe)
    end_s = time.monotonic() + WAIT_S
    awaited = {rank, *inbox.linked}
    if job.spec.exchange.topology != "allToAll":  # the batch is still divided among all workers
        awaited.update(worker.rank for worker in job.workers())
    while not (known(awaited) or stopped() or time.monotonic() > end_s):
        inbox.wait(SLICE_S)


def _speeds_matter(job: Job) -> bool:
    """Whether batches depend on speeds, or the end of the run on each worker's data.

    Sidecars exchange the sizes of the data with the speeds.
    """
    counts_data = job.spec.trainer.stop.max_epochs is not None
    return job.spec.batching.policy != "even" or (
        counts_data and not training_set_size_is_known(job)
    )

"""How fast this worker is, measured before its first step, and waiting until all know it of all.

Owns the probe: gradients of real batches by the compiled step, thrown away, with model, data and
chance afterwards as before. Without it workers begin with equal batches, and the first iterations
take as long as the weakest takes for those. Called by `worker` when all begin together. What it
means is the sidecar's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dlion_api.measurements import SpeedProbe
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_worker.exchange import Exchange
from dlion_worker.sidecar_client import SidecarClient
from dlion_worker.trainer.inbox import Inbox
from dlion_worker.trainer.quota_watch import QuotaWatch
from dlion_worker.trainer.start_up import first_trace
from dlion_worker.training.datasets import BatchStream, whole_is_known
from dlion_worker.training.model import FlatModel

FIRST_SAMPLES = 8
GROWTH = 4
STEP_S = 0.4
"""What a batch should take: some periods of a CFS quota, and as fixed costs of a step weigh in
training, where steps are no shorter by choice."""

LEAST_S = 1.5
"""Of measured steps; more than what the sidecar takes for a rate (`sidecar.capacity`)."""

MOST_S = 3.0
"""After which no further step is begun."""

MOST_SHARES = 2
"""A batch is never more than so many equal shares: what a worker may be given later is not known to
fit its memory."""

WAIT_S = 5.0
"""For the peers' capacities, after this worker's own: theirs began when its own did."""

SLICE_S = 0.02


@contextmanager
def untouched(model: FlatModel, stream: BatchStream) -> Iterator[None]:
    """Inside, steps may be computed and batches taken; afterwards all is as it was."""
    state, counters, place = model.get_state(), model.get_counters(), stream.state()
    try:
        yield
    finally:
        model.set_state(state)
        model.set_counters(counters)
        stream.restore(place)


def trace_first(model: FlatModel, stream: BatchStream) -> None:
    """Compiles step and evaluation now, so that the first iteration takes as long as any."""
    with first_trace(), untouched(model, stream):
        x_B, y_B = stream.next(FIRST_SAMPLES)
        model.step(x_B, y_B)
        model.evaluate(x_B, y_B)


@dataclass
class _Sum:
    samples: int = 0
    compute_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0

    def add(self, samples: int, compute_s: float, cpu_s: float) -> None:
        self.samples += samples
        self.compute_s += compute_s
        self.cpu_s += cpu_s
        self.steps += 1


class Probe:
    """One measurement, bounded in time; `run` yields it, None where it was stopped before."""

    def __init__(
        self,
        step: Callable[[int], None],
        *,
        most_samples: int,
        quota: QuotaWatch,
        other_cpu_s: Callable[[], float],
        stopped: Callable[[], bool],
        wall_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        """`step` computes the gradient of so many samples. `other_cpu_s`: the process's CPU that
        goes to something else."""
        self._step, self._most_samples = step, most_samples
        self._quota, self._other_cpu_s, self._stopped = quota, other_cpu_s, stopped
        self._wall_s, self._cpu_s = wall_s, cpu_s

    def run(self) -> SpeedProbe | None:
        """Batches grow until one takes `STEP_S`; then steps of that size count. The first of a
        size does not, as it gets memory; nor what went before a change of the quota."""
        samples = largest = min(FIRST_SAMPLES, self._most_samples)
        began_s, throttled_s = self._wall_s(), self._quota.throttled_s()
        counted, spare, is_first = _Sum(), _Sum(), True
        while not self._is_over(began_s, counted) and not self._stopped():
            one = self._timed(samples)
            if self._quota.changed():
                counted, throttled_s = _Sum(), self._quota.throttled_s()
                continue
            wanted = min(self._most_samples, int(samples * STEP_S / one.compute_s))
            if wanted > 1.5 * samples:
                samples, is_first = min(wanted, GROWTH * samples), True
                largest, spare = max(largest, samples), one
            elif is_first:
                is_first, spare, throttled_s = False, one, self._quota.throttled_s()
            else:
                counted.add(one.samples, one.compute_s, one.cpu_s)
        measured = counted if counted.steps else spare
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

    def _is_over(self, began_s: float, counted: _Sum) -> bool:
        if counted.steps > 1 and counted.compute_s >= LEAST_S:
            return True
        return self._wall_s() - began_s >= MOST_S

    def _timed(self, samples: int) -> _Sum:
        wall_s, cpu_s, other_cpu_s = self._wall_s(), self._cpu_s(), self._other_cpu_s()
        self._step(samples)
        used_s = (self._cpu_s() - cpu_s) - (self._other_cpu_s() - other_cpu_s)
        return _Sum(samples, max(1e-9, self._wall_s() - wall_s), used_s, 1)


def begin_with_known_speeds(
    job: Job,
    rank: Rank,
    *,
    model: FlatModel,
    stream: BatchStream,
    exchange: Exchange,
    sidecar: SidecarClient,
    inbox: Inbox,
    stopped: Callable[[], bool],
) -> None:
    """Measures this worker's speed and waits, not for ever, until its sidecar knows everybody's.

    Only where something follows from it, and only what is not known yet: after a restart it may be.
    """

    def known(ranks: set[Rank]) -> bool:
        directive = sidecar.latest_directive()
        return directive is not None and ranks <= directive.capacities.keys()

    if not _has_use(job) or not inbox.linked or known({rank}):
        return

    twin = model.sibling(seed=job.spec.trainer.seed, rank=rank)  # peers may ask for our state

    def step(samples: int) -> None:
        twin.step(*stream.next(samples))

    batch = job.spec.batching.global_batch_size.initial
    with untouched(twin, stream):
        probe = Probe(
            step,
            most_samples=max(1, min(batch, MOST_SHARES * batch // len(job.workers()))),
            quota=QuotaWatch(),
            other_cpu_s=exchange.cpu_s,
            stopped=stopped,
        ).run()
    if probe is None:
        return
    sidecar.send(probe)
    end_s = time.monotonic() + WAIT_S
    awaited = {rank, *inbox.linked}
    if job.spec.exchange.topology != "allToAll":  # the batch is shared out among all the same
        awaited.update(worker.rank for worker in job.workers())
    while not (known(awaited) or stopped() or time.monotonic() > end_s):
        inbox.wait(SLICE_S)


def _has_use(job: Job) -> bool:
    """Whether batches follow speeds, or the run's end follows from how much data each has, which
    sidecars tell with the speed."""
    counts_data = job.spec.trainer.stop.max_epochs is not None
    return job.spec.batching.policy != "even" or (counts_data and not whole_is_known(job))

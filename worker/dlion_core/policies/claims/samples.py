"""The largest counts of samples that a worker can have trained on.

Called by the policies: a contribution counts by its samples, so that a false count would take the
whole weight of a mean. Every worker knows the manifest, hence the global batch of an iteration at
its largest, and no worker makes an iteration twice.

Source: this project.
"""

import math
from collections.abc import Mapping
from functools import lru_cache

from dlion_api.names import Rank
from dlion_api.protocol.refusals import CallerError, PeerRefusal
from dlion_api.spec import GlobalBatchSize, Spec

EARLY_ADJUSTMENTS = 2
"""Adjustments of the global batch that a peer may have made before this worker: its sidecar plans
the next iteration, and workers are not at the same one."""


def max_batch_at(spec: Spec, iteration: int) -> int:
    """Return the largest global batch of that iteration, which bounds any local batch.

    Without growth it is the initial one. The published rule adds or multiplies at each adjustment;
    how long it does either depends on the training set, so the larger counts. `goodput` may choose
    the maximum at any time.
    """
    growth = spec.global_batch_size
    if not growth.growth:
        return growth.initial
    if spec.batching.policy == "goodput":
        return growth.max
    return _grown(growth, iteration // growth.every_steps + EARLY_ADJUSTMENTS)


def max_run_samples(spec: Spec, iteration: int) -> int:
    """Return the most samples that all workers together can have made until that iteration."""
    return max(1, iteration) * max_batch_at(spec, iteration)


@lru_cache(maxsize=64)  # one entry for each adjustment: messages of an iteration ask for the same
def _grown(growth: GlobalBatchSize, adjustments: int) -> int:
    increment = growth.increment or growth.initial
    if growth.initial + adjustments * increment >= growth.max:
        return growth.max
    size = growth.initial
    for _ in range(adjustments):
        size = max(size + increment, math.ceil(size * growth.factor))
        if size >= growth.max:
            return growth.max
    return size


def check_samples(what: str, samples: int, most: int, *, least: int = 1) -> None:
    """Raise CallerError unless `samples` is within what is possible."""
    if not least <= samples <= most:
        kind = PeerRefusal.IMPLAUSIBLE if samples > most else PeerRefusal.MALFORMED
        raise CallerError(kind, f"{what} of {samples} samples; allowed: {least} to {most}")


def check_vector(claimed: Mapping[Rank, int], most: Mapping[Rank, int]) -> None:
    """Raise CallerError if a worker is claimed to have trained on more samples than it can have.

    `most`: by worker, what this worker has counted and all that may have followed.
    """
    for rank, samples in claimed.items():
        if samples > most[rank]:
            raise CallerError(
                PeerRefusal.IMPLAUSIBLE,
                f"{samples} samples of worker {rank}; allowed: up to {most[rank]}",
            )

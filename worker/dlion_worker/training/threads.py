"""The thread pools of TensorFlow and NumPy, sized from the CPU quota.

TensorFlow does not see a quota: on a machine of 64 cores it starts 64 threads, which a quota of
two cores then throttles together. Called once by the trainer before any other part of
`dlion_worker.training`, and by whoever spawns a trainer (`environment`).
"""

from __future__ import annotations

import math
import os

from dlion_api.errors import DLionError

_POOL_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def thread_count(quota_cores: float | None) -> int:
    """Threads that can use the quota up: rounded up, at least one, at most the cores allowed.

    >>> thread_count(0.2)
    1
    """
    available = len(os.sched_getaffinity(0))
    if quota_cores is None:
        return available
    if not quota_cores > 0:
        raise DLionError(
            f"CPU quota: must be above 0 cores (given: {quota_cores}). "
            "Leave it out where there is no quota"
        )
    return max(1, min(available, math.ceil(quota_cores)))


def environment(quota_cores: float | None) -> dict[str, str]:
    """Variables for a trainer's environment, for the pools that are made when a library loads."""
    count = str(thread_count(quota_cores))
    return {
        **dict.fromkeys(_POOL_VARIABLES, count),
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Each arena of the C library keeps memory for itself; a trainer has few busy threads.
        "MALLOC_ARENA_MAX": "2",
    }


def configure(quota_cores: float | None, *, deterministic: bool = False) -> int:
    """Sizes TensorFlow's pools; the number of threads inside an operation.

    Two operations may run beside each other, so that an evaluation never has to wait for a whole
    step. `deterministic` makes TensorFlow refuse operations whose result depends on the order in
    which threads finish; the operations of the built-in programs repeat bit by bit without it.

    Raises: DLionError where TensorFlow has run an operation already (the pools stand then).
    """
    for name, value in environment(quota_cores).items():
        os.environ.setdefault(name, value)
    from dlion_worker.training.framework import tf

    count = thread_count(quota_cores)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(count)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    except RuntimeError as error:
        raise DLionError(
            "TensorFlow's thread pools are already made. Call threads.configure before anything "
            "else that uses TensorFlow in this process"
        ) from error
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    return count

"""Sizes the thread pools of TensorFlow and NumPy from the CPU quota; sets their priority.

TensorFlow ignores quotas: on 64 cores it starts 64 threads, which a quota of two cores then
throttles together. The trainer calls it before other parts of `dlion_worker.training`; parents of
trainers use `environment`.
"""

import math
import os
from contextlib import suppress
from pathlib import Path

from dlion_api.errors import DLionError

_TASKS = Path("/proc/self/task")
_POOL_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def thread_count(quota_cores: float | None) -> int:
    """Threads that can use up the quota: rounded up, from one to the available cores.

    >>> thread_count(0.2)
    1
    """
    available = len(os.sched_getaffinity(0))
    if quota_cores is None:
        return available
    if not quota_cores > 0:
        raise DLionError(
            f"CPU quota: must be above 0 cores (given: {quota_cores}). Omit it if there is no quota"
        )
    return max(1, min(available, math.ceil(quota_cores)))


def environment(quota_cores: float | None) -> dict[str, str]:
    """Environment variables for a trainer, for pools created when a library loads."""
    count = str(thread_count(quota_cores))
    return {
        **dict.fromkeys(_POOL_VARIABLES, count),
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Each arena of the C library retains memory; a trainer has few busy threads.
        "MALLOC_ARENA_MAX": "2",
    }


def configure(quota_cores: float | None) -> int:
    """Size TensorFlow's pools; return the number of threads inside an operation.

    Two operations may run at once, so an evaluation never waits for a whole step.

    Raises: DLionError where TensorFlow has already run an operation (the pools are then fixed).
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
            "TensorFlow's thread pools already exist. Call threads.configure before anything "
            "else that uses TensorFlow in this process"
        ) from error
    return count


def lower_priority(niceness: int) -> None:
    """Add to the niceness of all threads of this process; later ones inherit it.

    `os.nice` changes only the calling thread on Linux, and none of a pool that is there.
    """
    lowered = os.getpriority(os.PRIO_PROCESS, 0) + niceness
    for task in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, int(task.name), lowered)

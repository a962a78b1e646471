"""When a run is over, by this worker's own count. Pure: time is an argument.

Owns the local stop conditions of `spec.trainer.stop`. `targetAccuracy` is judged on the mean over
replicas, which the coordinator knows: it asks the workers to stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.endings import stop_rule_met
from dlion_api.spec import Stop


@dataclass
class JobProgress:
    """How far the whole job is, as one worker counts it: its own share stands for all."""

    iteration: int = 0
    own_samples: int = 0
    job_samples: int = 0
    """Samples of all workers: each iteration counts the global batch size."""
    trained_s: float = 0.0
    """Seconds of training, those before a resume included."""

    def advance(self, iteration: int, *, local_batch_size: int, global_batch_size: int) -> None:
        """Counts one iteration of this worker, and those that the job has made without it."""
        self.job_samples += (iteration - self.iteration) * global_batch_size
        self.iteration = iteration
        self.own_samples += local_batch_size

    def epochs(self, training_set_samples: int) -> float | None:
        """How often all workers together have gone through so many samples; None: through none."""
        return self.job_samples / training_set_samples if training_set_samples > 0 else None

    def take(self, other: JobProgress) -> None:
        """Becomes equal to another."""
        self.iteration, self.own_samples = other.iteration, other.own_samples
        self.job_samples, self.trained_s = other.job_samples, other.trained_s


def stop_reason(stop: Stop, progress: JobProgress, *, training_set_samples: int) -> str | None:
    """Why the run is over, or None; `training_set_samples` counts the whole job's data, 0: nobody
    knows it yet."""
    if stop.max_steps is not None and progress.iteration >= stop.max_steps:
        return stop_rule_met("maxSteps", stop.max_steps)
    if stop.max_seconds is not None and progress.trained_s >= stop.max_seconds:
        return stop_rule_met("maxSeconds", stop.max_seconds)
    if (
        stop.max_epochs is not None
        and training_set_samples > 0
        and progress.job_samples >= stop.max_epochs * training_set_samples
    ):
        return stop_rule_met("maxEpochs", stop.max_epochs)
    return None


class EvaluationSchedule:
    """When the held-out split is due: each time the job has seen another `every_samples`."""

    def __init__(self, every_samples: int, *, done: int = 0) -> None:
        self._every = every_samples
        self._done = done

    def due(self, progress: JobProgress) -> bool:
        """True once per interval; intervals that were passed in one go count as one."""
        reached = progress.job_samples // self._every
        if reached <= self._done:
            return False
        self._done = reached
        return True

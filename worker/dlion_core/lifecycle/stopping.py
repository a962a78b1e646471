"""Decides from a worker's own counts when a run is over. Pure: time is an argument.

Owns the local stop conditions of `spec.trainer.stop`. The coordinator evaluates `targetAccuracy`,
because it needs the mean over replicas, and asks the workers to stop.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from dlion_api.endings import stop_rule_met
from dlion_api.names import Rank
from dlion_api.spec import Job, Spec, Stop

MAX_OVERRUN_S = 2.0
"""A step in lock step that would end later than this after `maxSeconds` does not begin.

Once begun, it must be finished: its gradients may have reached some workers already, which make the
update, and replicas would differ if others abandoned it. Its end would not come sooner, either: the
announcement of a stop follows the gradient that is on the link.
"""


@dataclass
class JobProgress:
    """The job's progress as one worker estimates it from its own share."""

    iteration: int = 0
    own_samples: int = 0
    job_samples: int = 0
    """Samples of all workers: each iteration counts the global batch size."""
    trained_s: float = 0.0
    """Seconds of training, including those before a resume."""
    global_batch_size: int = 0
    """Samples of all workers in the last iteration; 0: unknown."""

    def advance(self, iteration: int, *, local_batch_size: int, global_batch_size: int) -> None:
        """Count one own iteration, and those that the job made without this worker."""
        self.job_samples += (iteration - self.iteration) * global_batch_size
        self.iteration = iteration
        self.own_samples += local_batch_size
        self.global_batch_size = global_batch_size

    def epochs(self, training_set_samples: int) -> float | None:
        """How often all workers together passed through that many samples; None for 0 samples."""
        return self.job_samples / training_set_samples if training_set_samples > 0 else None

    def take(self, other: JobProgress) -> None:
        self.iteration, self.own_samples = other.iteration, other.own_samples
        self.job_samples, self.trained_s = other.job_samples, other.trained_s
        self.global_batch_size = other.global_batch_size


def own_stop(spec: Spec, rank: Rank) -> Stop:
    """The rules that this worker can judge: one that does not train counts no steps."""
    if spec.exchange.trains(rank):
        return spec.trainer.stop
    return Stop(max_seconds=spec.trainer.stop.max_seconds)


def stop_reason(
    stop: Stop, progress: JobProgress, *, training_set_samples: int, next_step_s: float = 0.0
) -> str | None:
    """Why the run is over, or None. `training_set_samples` counts the whole job's data; 0:
    unknown. `next_step_s`: how long the step would take that begins otherwise."""
    if stop.max_steps is not None and progress.iteration >= stop.max_steps:
        return stop_rule_met("maxSteps", stop.max_steps)
    if stop.max_seconds is not None:
        met, at_s = stop_rule_met("maxSeconds", stop.max_seconds), progress.trained_s
        if at_s >= stop.max_seconds:
            return met
        if next_step_s > MAX_OVERRUN_S and at_s + next_step_s - MAX_OVERRUN_S >= stop.max_seconds:
            return f"{met}: after {at_s:.1f} s, as a step takes {next_step_s:.1f} s"
    if (
        stop.max_epochs is not None
        and training_set_samples > 0
        and progress.job_samples >= stop.max_epochs * training_set_samples
    ):
        return stop_rule_met("maxEpochs", stop.max_epochs)
    return None


class EvaluationSchedule:
    """Decides when to evaluate: after every further `every_samples` of the job.

    An evaluation that is due within a round of local steps waits for the round's end, but no longer
    than an interval. All replicas have the same weights there, so one evaluation is that of all.
    """

    def __init__(self, every_samples: int, *, done_samples: int = 0) -> None:
        self._every = every_samples
        self._done = done_samples // every_samples

    @classmethod
    def of(cls, job: Job, rank: Rank, done_samples: int = 0) -> EvaluationSchedule:
        """The schedule of a worker; one that does not train has nothing to evaluate."""
        every = job.spec.trainer.evaluation.every_samples
        trains = job.spec.exchange.trains(rank)
        return cls(every if trains else sys.maxsize, done_samples=done_samples)

    def due(self, job_samples: int, *, is_mid_round: bool = False) -> bool:
        """True once per interval; several intervals passed at once count as one."""
        reached = job_samples // self._every
        if reached <= self._done + is_mid_round:
            return False
        self._done = reached - is_mid_round
        return True

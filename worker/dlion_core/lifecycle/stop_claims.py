"""Whether a peer's announcement that the run is over can be true. Pure.

Owned by the trainer, which knows its own progress; `inbox` asks. A stop rule that this worker is
near itself is believed at once. Everything else needs the word of others: more than half of the
linked peers, at least two. Another site may end the run for a reason of its own, such as a
deadline, if every linked worker of it announces that; such a run has not succeeded. This worker's
own coordinator stops it by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dlion_api.endings import is_stop_rule, own_reason
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_api.spec.policies import DECODER
from dlion_core.lifecycle.stopping import JobProgress

CONFIRM_WITHIN_S = 10.0
"""How long a stop is awaited that this worker cannot check: a coordinator hears of other sites
every five seconds."""

MIN_DONE_FRACTION = 0.5
"""Fraction of a stop rule that this worker must have reached to believe that a peer has met it.
Workers make similar progress, except for those that were absent."""

MIN_HEARD_FRACTION = 0.25
"""Minimum fraction of a claimed count of steps or samples that the peer's received steps must
account for, if the claim exceeds this worker's own progress."""

MIN_OWN_STEPS = 4
"""Minimum own steps by which another worker's pace is measured."""


@dataclass(frozen=True)
class StopClaim:
    """A peer's announcement."""

    sender: Rank
    reason: str
    iteration: int
    arrived_s: float
    """By the inbox's clock."""
    heard_steps: int
    """Steps of the sender that have arrived at this process."""


class StopDoubts:
    """Why a worker does not believe a stop."""

    def __init__(
        self,
        job: Job,
        rank: Rank,
        progress: JobProgress,
        *,
        elapsed_s: Callable[[], float],
        training_set_samples: Callable[[], int],
        max_lead: int | None = None,
        stops_itself: Callable[[], bool] = lambda: False,
    ) -> None:
        """`elapsed_s`: since the run began. `training_set_samples` is that of `stop_reason`.
        `max_lead`: the most iterations by which a peer can be ahead of this worker; None: any.
        `stops_itself`: whether this worker was asked to end, so that nothing needs to be checked.
        """
        self._job, self._rank, self._progress = job, rank, progress
        self._elapsed_s, self._samples = elapsed_s, training_set_samples
        self._max_lead, self._stops_itself = max_lead, stops_itself
        self._first_iteration = progress.iteration

    def __call__(self, claim: StopClaim, *, stopped: set[Rank], linked: set[Rank]) -> str:
        """Return what speaks against it; empty: nothing. `stopped`: peers that announced a stop."""
        if claim.sender == DECODER and not self._job.spec.exchange.trains(self._rank):
            return ""  # no other worker trains
        if self._stops_itself() or (len(stopped) > 1 and 2 * len(stopped) > len(linked)):
            return ""
        reason = own_reason(claim.reason)
        if not is_stop_rule(reason):
            return "" if self._is_end_by_site(claim, stopped, linked) else "it is not confirmed"
        rule = reason.partition(" ")[0]
        if rule == "targetAccuracy":
            return "it is not confirmed"
        done, wanted = self._reached(rule)
        if wanted is None:
            return f"the manifest has no {rule}"
        if max(done, self._likely(rule, done, claim)) >= wanted * MIN_DONE_FRACTION:
            return ""
        if self._heard(rule, done, claim) >= wanted * MIN_HEARD_FRACTION:
            return ""
        return f"this worker has reached {done:,.6g} of {wanted:,.6g}"

    def _heard(self, rule: str, done: float, claim: StopClaim) -> float:
        """What the sender has reached by its steps that have arrived. Steps that it cannot have
        made, as it waits for this worker, prove nothing."""
        if rule == "maxSeconds":
            return 0.0
        own, steps = self._progress.iteration, claim.heard_steps
        if self._max_lead is not None:
            steps = min(steps, own + self._max_lead)
        return done / max(1, own) * steps

    def _likely(self, rule: str, done: float, claim: StopClaim) -> float:
        """What the sender has reached if it has always been as much faster as in this process.
        Workers that do not wait for each other resume from different iterations."""
        if rule == "maxSeconds" or self._max_lead is not None:
            return 0.0
        own_steps = self._progress.iteration - self._first_iteration
        return done * claim.heard_steps / max(MIN_OWN_STEPS, own_steps)

    def _reached(self, rule: str) -> tuple[float, float | None]:
        stop, progress = self._job.spec.trainer.stop, self._progress
        if rule == "maxSteps":
            return progress.iteration, stop.max_steps
        if rule == "maxSeconds":
            return max(progress.trained_s, self._elapsed_s()), stop.max_seconds
        samples = self._samples()
        if stop.max_epochs is None or not samples:
            return 0.0, stop.max_epochs
        return progress.job_samples, stop.max_epochs * samples

    def _is_end_by_site(self, claim: StopClaim, stopped: set[Rank], linked: set[Rank]) -> bool:
        """Whether all linked workers of another site have stopped, as their coordinator asks. That
        of this worker's site asks this worker, too."""
        site = self._job.worker(claim.sender).site
        workers = {rank for rank in linked if self._job.worker(rank).site == site}
        return site != self._job.worker(self._rank).site and workers <= stopped

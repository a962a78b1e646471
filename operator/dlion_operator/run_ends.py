"""Whether a run is over, and how it ended: from its Jobs, pods and status. Pure.

A run succeeds when its stop rule was met and the saved model holds every replica that is wanted.
`decide` asks here before it stops a run; nothing here follows from what an operator does not know
yet: what must outlive an operator stands on an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from dlion_api.endings import EndReport, is_stop_rule, own_reason
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.status import ConditionType, Reason
from dlion_operator.findings import MOST_NAMED, joined
from dlion_operator.observed import KNOWN_AFTER_S, Observed
from dlion_operator.runs import Run
from dlion_operator.situations import Finding, Situation

CLOCKS_DIFFER_S = 5.0
"""A Job's creation time is in whole seconds."""

A_WORKER_FINISHED = "a worker has finished"
"""Why an operator asks the others to end: it tells nothing of why the first one did."""

_REASON_OF_EXIT = {
    ExitCode.PROGRAM: Reason.PROGRAM_FAILED,
    ExitCode.SPEC: Reason.INVALID_SPEC,
    ExitCode.RESTARTS: Reason.RESTARTS_EXCEEDED,
    ExitCode.MODEL_LOST: Reason.MODEL_LOST,
}


def status_of_run(seen: Observed, run_id: str) -> Mapping[str, Any]:
    """The status as it stands, if it is of that run."""
    status = seen.document.get("status") or {}
    return status if status.get("runId") == run_id else {}


def has_trained(run: Run, seen: Observed) -> bool:
    """Whether workers of this site have trained in this run.

    An operator that has just started reads it from the status, which an earlier one wrote.
    """
    if seen.run is not None and seen.run.training:
        return True
    status = status_of_run(seen, run.job.key.run_id)
    # `trainerStatus` alone: from an operator that does not write `trainingStartTime`.
    return bool(status.get("trainingStartTime") or status.get("trainerStatus"))


def just_opened(run: Run, seen: Observed) -> bool:
    """Whether workers may be there that this operator has not heard from yet."""
    if seen.run is None:
        return True
    age_s = (seen.now - run.made_at).total_seconds() if run.made_at else 0.0
    has_served_all_along = age_s <= seen.run.open_s + CLOCKS_DIFFER_S
    return seen.run.open_s < KNOWN_AFTER_S and not has_served_all_along


def why_over(run: Run, seen: Observed) -> str:
    """Why a run cannot go on without the workers that have failed; empty: it can."""
    if not run.failed:
        return ""
    spec = run.job.spec
    if not has_trained(run, seen) and spec.start_deadline_seconds is None:
        # Others may train that this operator has not heard from yet.
        return (
            ""
            if just_opened(run, seen)
            else "the others would wait for it (no startDeadlineSeconds)"
        )
    if spec.failure_policy == "Fail":
        return "failurePolicy is Fail"
    if len(run.failed) >= run.size and len(spec.sites) - 1 < spec.min_sites:
        return "no worker is left"
    return ""


def too_long(run: Run, now: datetime) -> bool:
    """Whether the run has taken longer than it may."""
    limit = run.job.spec.active_deadline_seconds
    if limit is None or run.started_at is None:
        return False
    return now - run.started_at > timedelta(seconds=limit)


def ended_at(seen: Observed, run_id: str) -> tuple[str, str] | None:
    """Type and time of the condition by which that very run is over; None: it is not."""
    for condition in status_of_run(seen, run_id).get("conditions") or ():
        ends = condition.get("type") in (ConditionType.SUCCEEDED, ConditionType.FAILED)
        if ends and condition.get("status") == "True":
            return str(condition["type"]), str(condition.get("lastTransitionTime") or "")
    return None


# ---- how it ended ------------------------------------------------------------------------------


def verdict(run: Run, seen: Observed) -> Finding:
    """How a run ended whose Jobs have all come to their end, or that is given up."""
    lost = [pod.failure for pod in run.pods if pod.trainer_exit == ExitCode.MODEL_LOST]
    if lost:
        said = "the run is over and the site's model is lost: the keeper did not get it"
        return Finding(Situation.FAILED, Reason.MODEL_LOST, joined([said, *lost]))
    if too_long(run, run.ended_at or seen.now):
        limit = run.job.spec.active_deadline_seconds
        words = f"the run took longer than activeDeadlineSeconds ({limit} s); what it had is saved"
        return Finding(Situation.FAILED, Reason.DEADLINE_EXCEEDED, words)
    if run.succeeded == 0 or (run.failed and run.job.spec.failure_policy == "Fail"):
        return failure(run)
    why = stop_reason(run, seen)
    missing = _missing(run)
    if why and not is_stop_rule(why):
        early = f"ended {_how_far(run, seen)}, before its stop rule was met: {why}"
        return Finding(Situation.FAILED, Reason.ENDED_EARLY, joined([early, *missing]))
    done = why or f"{run.succeeded} workers ended well"
    if missing:
        return Finding(Situation.FAILED, Reason.PARTIAL, joined([*missing, done]))
    return Finding(Situation.SUCCEEDED, Reason.COMPLETED, done)


def stop_reason(run: Run, seen: Observed) -> str:
    """Why the run ended, as its workers report it; empty: not known. A stop rule outweighs what a
    worker reports that came back at the end."""
    reasons = [report.stop_reason for report in _reports(run)]
    reasons += [own_reason(seen.run.stop_reason)] if seen.run else []
    reasons = [reason for reason in reasons if reason != A_WORKER_FINISHED]
    return next(filter(is_stop_rule, reasons), next(filter(None, reasons), ""))


def model_ranks(run: Run) -> tuple[Rank, ...]:
    """The replicas that this site's model holds; empty: not known."""
    return max((report.ranks for report in _reports(run)), key=len, default=())


def _reports(run: Run) -> Iterator[EndReport]:
    return (report for pod in run.pods if (report := pod.end_report) is not None)


def _missing(run: Run) -> list[str]:
    """Which wanted replicas the model lacks, in words; empty: none, as far as is known."""
    words = []
    if run.failed:
        words.append(f"the model lacks {_named(run.failed)}: failed for good")
    saved = max(_reports(run), key=lambda report: len(report.ranks), default=None)
    if saved is None or not saved.ranks:
        return words
    wanted = {worker.rank: worker for worker in run.workers}
    here = {f"{run.site}/{name}" for name in run.failed}
    absent = [wanted[rank].name for rank in saved.missing if rank in wanted]
    if others := [name for name in absent if name not in here]:
        words.append(f"the model lacks {_named(others)}: not reached at the end")
    return words


def _named(workers: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(workers) - MOST_NAMED} more" if len(workers) > MOST_NAMED else ""
    return ", ".join(workers[:MOST_NAMED]) + more


def _how_far(run: Run, seen: Observed) -> str:
    """The progress that was reached, in words."""
    iteration = max((report.iteration for report in _reports(run)), default=0)
    iteration = iteration or (seen.run.iteration if seen.run else 0)
    trainer = (seen.run.trainer_status if seen.run else None) or None
    percent = trainer.progress_percentage if trainer else None
    if percent is None:
        before = status_of_run(seen, run.job.key.run_id).get("trainerStatus") or {}
        percent = before.get("progressPercentage")
    share = "" if percent is None else f" ({percent} %)"
    return f"at iteration {iteration}{share}" if iteration else f"early{share}"


def failure(run: Run) -> Finding:
    """Why a run failed, from the pods that did."""
    failures = [pod for pod in run.pods if pod.failure]
    codes = [pod.trainer_exit for pod in failures]
    known = [code for code in codes if code is not None and code in set(ExitCode)]
    reason = next(
        (_REASON_OF_EXIT[ExitCode(c)] for c in known if ExitCode(c) in _REASON_OF_EXIT),
        Reason.WORKERS_FAILED
        if any(ExitCode(c).fatal for c in known)
        else Reason.RESTARTS_EXCEEDED,
    )
    words = [pod.failure for pod in failures]
    words = words or [job.failure for job in run.jobs.values() if job.failure]
    if run.failed:
        words.insert(0, f"{_named(run.failed)} failed for good")
    return Finding(Situation.FAILED, reason, joined(words or ["no worker trained to the end"]))

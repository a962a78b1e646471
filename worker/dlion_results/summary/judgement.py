"""Decides whether a run succeeded, for `dlion run` and `dlion simulate`.

A run has succeeded if its stop rule was met and each saved model holds the replica of every worker
in the manifest. An operator applies the same rule in a cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dlion_api.endings import is_stop_rule, own_reason
from dlion_api.exit_codes import ExitCode
from dlion_results.run_folder.models import SiteModel


class EndReason(StrEnum):
    """`ending.reason` in summary.json. The first five are also a cluster's reasons."""

    COMPLETED = "Completed"
    ENDED_EARLY = "EndedEarly"
    PARTIAL = "Partial"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    PROGRAM_FAILED = "ProgramFailed"
    STOPPED = "Stopped"  # `stop.continuous`, ended by a signal as intended
    INTERRUPTED = "Interrupted"
    DATA_FAILED = "DataFailed"
    DIVERGED = "Diverged"
    STORAGE_FAILED = "StorageFailed"
    UNAVAILABLE = "Unavailable"
    FAILED = "Failed"

    @classmethod
    def of(cls, code: ExitCode) -> EndReason:
        """The reason for an exit code.

        >>> EndReason.of(ExitCode.STORAGE), EndReason.of(ExitCode.SPEC)
        (<EndReason.STORAGE_FAILED: 'StorageFailed'>, <EndReason.FAILED: 'Failed'>)
        """
        return _REASONS.get(code, cls.FAILED)


_REASONS = {
    ExitCode.OK: EndReason.COMPLETED,
    ExitCode.ENDED_EARLY: EndReason.ENDED_EARLY,
    ExitCode.PARTIAL: EndReason.PARTIAL,
    ExitCode.DEADLINE: EndReason.DEADLINE_EXCEEDED,
    ExitCode.PROGRAM: EndReason.PROGRAM_FAILED,
    ExitCode.INTERRUPTED: EndReason.INTERRUPTED,
    ExitCode.DATA: EndReason.DATA_FAILED,
    ExitCode.DIVERGED: EndReason.DIVERGED,
    ExitCode.STORAGE: EndReason.STORAGE_FAILED,
    ExitCode.UNAVAILABLE: EndReason.UNAVAILABLE,
}


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run that ended in order."""

    exit_code: ExitCode
    stop_reason: str
    missing: tuple[int, ...] = ()
    """Ranks of replicas that a saved model lacks."""
    message: str = ""
    """What is missing; empty if nothing is."""


def judge_run(
    stop_reasons: Sequence[str],
    *,
    expected: Collection[int],
    models: Sequence[SiteModel],
    iteration: int,
    why: Mapping[int, str] | None = None,
) -> RunVerdict:
    """Judge a run that ended in order.

    `stop_reasons` are its workers', in order. `expected` are the ranks that a model must hold,
    `models` the saved models, `iteration` the last one. `why` explains workers that ended
    permanently.
    """
    reasons = [own_reason(reason) for reason in stop_reasons] or ["no worker trained to the end"]
    met = next(filter(is_stop_rule, reasons), None)
    held = set(expected).intersection(*(model.ranks for model in models)) if models else set()
    missing = tuple(sorted(set(expected) - held))
    if met is None:
        text = (
            f"the run ended early, at iteration {iteration:,}, before its stop rule was met: "
            f"{reasons[0]}"
        )
        return RunVerdict(ExitCode.ENDED_EARLY, reasons[0], missing, text)
    if not missing:
        return RunVerdict(ExitCode.OK, met)
    text = f"the result is partial: {_lacks(models, missing)}{_whys(missing, why or {})}"
    return RunVerdict(ExitCode.PARTIAL, met, missing, text)


def _lacks(models: Sequence[SiteModel], missing: Sequence[int]) -> str:
    if not models:
        return "no model was saved"
    if len({model.ranks for model in models}) == 1:
        return f"the saved model lacks {_workers(missing)}"
    each = "; ".join(f"that of {model.site} holds {_workers(model.ranks)}" for model in models)
    return f"the saved models differ: {each}"


def _whys(missing: Sequence[int], why: Mapping[int, str]) -> str:
    known = [f"worker {rank} {why[rank]}" for rank in missing if rank in why]
    return f" ({'; '.join(known)})" if known else ""


def _workers(ranks: Sequence[int]) -> str:
    """
    >>> _workers([3]), _workers([0, 1])
    ('worker 3', 'workers 0, 1')
    """
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

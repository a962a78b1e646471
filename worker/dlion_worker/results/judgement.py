"""How a run ended: one definition of success for `dlion run` and `dlion simulate`.

A run has succeeded where its stop rule was met and each saved model holds the replica of every
worker that the manifest has. Called by the command line when all processes have ended. No I/O; an
operator judges runs of a cluster by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from dlion_api.endings import is_stop_rule, own_reason
from dlion_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dlion_worker.results.models import SavedModel


class EndReason(StrEnum):
    """`ending.reason` in summary.json. The first five are a cluster's reasons, too."""

    COMPLETED = "Completed"
    ENDED_EARLY = "EndedEarly"
    PARTIAL = "Partial"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    PROGRAM_FAILED = "ProgramFailed"
    STOPPED = "Stopped"  # `stop.continuous`, by a signal: as it should
    INTERRUPTED = "Interrupted"
    DATA_FAILED = "DataFailed"
    DIVERGED = "Diverged"
    STORAGE_FAILED = "StorageFailed"
    UNAVAILABLE = "Unavailable"
    FAILED = "Failed"

    @classmethod
    def of(cls, code: ExitCode) -> EndReason:
        """The reason that goes with an exit code.

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
class Judgement:
    """What a run that ended in order comes to."""

    exit_code: ExitCode
    stop_reason: str
    missing: tuple[int, ...] = ()
    """Replicas that a saved model lacks."""
    message: str = ""
    """What is missing; empty: nothing is."""


def judge(
    stop_reasons: Sequence[str],
    *,
    expected: Collection[int],
    models: Sequence[SavedModel],
    iteration: int,
    why: Mapping[int, str] | None = None,
) -> Judgement:
    """What such a run comes to.

    `stop_reasons`: of its workers, in their order. `expected`: ranks that a model is to hold;
    `models`: those that this run has saved. `iteration`: the last one. `why`: what became of a
    worker that ended for good.
    """
    reasons = [own_reason(reason) for reason in stop_reasons] or ["no worker trained to the end"]
    met = next(filter(is_stop_rule, reasons), None)
    held = set(expected).intersection(*(model.ranks for model in models)) if models else set()
    missing = tuple(sorted(set(expected) - held))
    if met is None:
        words = (
            f"the run ended early, at iteration {iteration:,}, before its stop rule was met: "
            f"{reasons[0]}"
        )
        return Judgement(ExitCode.ENDED_EARLY, reasons[0], missing, words)
    if not missing:
        return Judgement(ExitCode.OK, met)
    words = f"the result is partial: {_lacks(models, missing)}{_whys(missing, why or {})}"
    return Judgement(ExitCode.PARTIAL, met, missing, words)


def _lacks(models: Sequence[SavedModel], missing: Sequence[int]) -> str:
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

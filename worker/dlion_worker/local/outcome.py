"""How a local run ended, as the runner saw its processes end. Reads logs, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_worker.local.last_words import last_words
from dlion_worker.local.measuring import Comparison


@dataclass(frozen=True)
class Failure:
    """How a worker ended for good before the run did."""

    code: ExitCode
    words: str
    """The last error in its log; empty where there is none."""

    def __str__(self) -> str:
        return f"{self.code.name} ({int(self.code)}){': ' if self.words else ''}{self.words}"


@dataclass(frozen=True)
class RunOutcome:
    """How a local run ended."""

    exit_code: ExitCode
    """OK: it ended in order, and what it comes to is to be judged."""
    failed: dict[Rank, Failure]
    comparisons: tuple[Comparison, ...]
    """What the environment asked for beside what came of it."""
    problems: tuple[str, ...] = ()
    """Why the run was given up, beside workers that failed."""


def how_it_failed(code: int, log: Path) -> Failure:
    """How a worker's supervisor ended, with what the worker said last.

    A code that is none of ours is a crash: of it any last line tells more than none.
    """
    if code in set(ExitCode):
        return Failure(ExitCode(code), last_words(log))
    said = last_words(log, any_line=True)
    return Failure(ExitCode.FAILED, f"exit code {code}{': ' if said else ''}{said}")

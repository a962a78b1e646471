"""How a local run ended, as the runner saw its processes end. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
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

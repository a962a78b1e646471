"""What `dlion preflight` finds: one check for each thing that a run over several sites needs.

Made by `site_dialling` and by what asks clusters; shown by `preflight`. Looks at nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dlion_api.exit_codes import ExitCode


class Outcome(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """It could not be made here, or tells nothing either way."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, at one site."""

    site: str
    name: str
    outcome: Outcome
    seen: str
    advice: str = ""
    """What to do; empty where there is nothing to do."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by names that end in the unit."""

    def as_json(self) -> dict[str, Any]:
        """One object of `-o json`."""
        return {
            "site": self.site,
            "check": self.name,
            "outcome": str(self.outcome),
            "seen": self.seen,
            "advice": self.advice,
            "figures": dict(self.figures),
        }


def exit_code(checks: Iterable[Check]) -> ExitCode:
    """UNAVAILABLE where a check failed; warnings are none."""
    failed = any(check.outcome is Outcome.FAIL for check in checks)
    return ExitCode.UNAVAILABLE if failed else ExitCode.OK

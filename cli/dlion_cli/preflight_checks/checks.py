"""The result of one check of `dlion preflight`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class CheckOutcome(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    """The check was not possible, or is inconclusive."""


@dataclass(frozen=True)
class Check:
    """One check of one site."""

    site: str
    name: str
    outcome: CheckOutcome
    observed: str
    advice: str = ""
    """What to do; may be empty."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Measurements, by names that end in the unit."""

    def as_json(self) -> dict[str, Any]:
        """One object of `-o json`."""
        return {
            "site": self.site,
            "check": self.name,
            "outcome": str(self.outcome),
            "observed": self.observed,
            "advice": self.advice,
            "figures": dict(self.figures),
        }

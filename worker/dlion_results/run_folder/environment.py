"""Requested and measured values of an environment, as results store them.

Defines `environment.yaml` and that part of the summary. The local runner measures.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

LINK_RATE, LATENCY, QUOTA = "link rate", "latency, one way", "CPU quota"
"""What is compared, as the report names it."""
COMMAND_FIELD: Final = "command"
"""The first field of `environment.yaml`, so that `dlion ls` need not read it whole."""


class LocalCommand(StrEnum):
    """What makes a run on this machine."""

    RUN = "run"
    SIMULATE = "simulate"
    REPLAY = "replay"


@dataclass(frozen=True)
class EnvironmentFigure:
    """One quantity of a worker, or of its link to `peer`; None if unknown or not enforced."""

    rank: int
    quantity: str
    unit: str
    requested: float | None
    measured: float | None
    peer: int | None = None
    note: str = ""
    begins_s: float = 0.0
    """When it was first requested, in seconds of the run."""


@dataclass(frozen=True)
class EnvironmentReport:
    """The environment of a run; `document` is the environment file."""

    name: str
    figures: tuple[EnvironmentFigure, ...] = ()
    notes: tuple[str, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)
    command: LocalCommand | None = None
    """None: an older release wrote the folder."""


def environment_document(environment: EnvironmentReport) -> dict[str, Any]:
    """Content for `environment.yaml` and the summary."""
    return {
        COMMAND_FIELD: str(environment.command or ""),
        "name": environment.name,
        "figures": [
            {
                **asdict(figure),
                "requested": finite_or_none(figure.requested),
                "measured": finite_or_none(figure.measured),
            }
            for figure in environment.figures
        ],
        "notes": list(environment.notes),
        "document": dict(environment.document),
    }


def finite_or_none(value: float | None) -> float | None:
    """The value, or None if it is not finite: JSON has neither NaN nor infinity."""
    return None if value is None or not math.isfinite(value) else float(value)

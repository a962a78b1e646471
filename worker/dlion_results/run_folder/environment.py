"""Requested and measured values of an environment, as results store them.

Defines `environment.yaml` and that part of the summary. The local runner measures; this module
converts to common units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from dlion_api.names import Rank


class Quantity(StrEnum):
    """What is compared, with its unit."""

    LINK_RATE = "linkBytesPerS"
    LATENCY = "latencyS"
    QUOTA = "quotaCores"


@dataclass(frozen=True)
class Comparison:
    """A requested and a measured value; `measured` is None if it was not enforced."""

    quantity: Quantity
    rank: Rank
    peer: Rank | None
    requested: float
    measured: float | None
    note: str = ""
    begins_s: float = 0.0
    """When it was first requested, in seconds of the run."""

    @property
    def ratio(self) -> float | None:
        """Measured over requested."""
        return None if self.measured is None else self.measured / self.requested

    def to_json(self) -> dict[str, Any]:
        """As it is stored in the result folder."""
        return {**asdict(self), "ratio": self.ratio}


_SPELLINGS: Mapping[str, tuple[str, str, float]] = {
    "linkBytesPerS": ("link rate", "Mbit/s", 8e-6),
    "latencyS": ("latency, one way", "ms", 1e3),
    "quotaCores": ("CPU quota", "cores", 1.0),
}
"""Quantity -> (display name, unit, factor to that unit)."""


@dataclass(frozen=True)
class EnvironmentFigure:
    """One quantity of a worker, or of its link to `peer`; None if unknown."""

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


def environment_report(
    name: str,
    comparisons: Iterable[Comparison] = (),
    *,
    document: Mapping[str, Any] | None = None,
    notes: Iterable[str] = (),
) -> EnvironmentReport:
    """Report the local runner's comparisons."""
    figures = tuple(_figure(comparison) for comparison in comparisons)
    return EnvironmentReport(name, figures, tuple(notes), document or {})


def environment_document(environment: EnvironmentReport) -> dict[str, Any]:
    """Content for `environment.yaml` and the summary."""
    return {
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


def _figure(comparison: Comparison) -> EnvironmentFigure:
    quantity, unit, factor = _SPELLINGS[comparison.quantity]
    measured = comparison.measured
    return EnvironmentFigure(
        rank=int(comparison.rank),
        quantity=quantity,
        unit=unit,
        requested=comparison.requested * factor,
        measured=None if measured is None else measured * factor,
        peer=None if comparison.peer is None else int(comparison.peer),
        note=comparison.note,
        begins_s=comparison.begins_s,
    )

"""What an environment asked of the machine beside what it gave, as results keep it.

Owns `environment.yaml` and that part of the summary. The local runner measures; this only spells
its comparisons in the units that people use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlion_worker.local.measuring import Comparison

_SPELLINGS: Mapping[str, tuple[str, str, float]] = {
    "linkBytesPerS": ("link rate", "Mbit/s", 8e-6),
    "latencyS": ("latency, one way", "ms", 1e3),
    "quotaCores": ("CPU quota", "cores", 1.0),
}
"""Quantity -> (name for people, unit, factor to that unit)."""


@dataclass(frozen=True)
class EnvironmentFigure:
    """One quantity of one worker, or of its link to `peer`; None where it is not known."""

    rank: int
    quantity: str
    unit: str
    requested: float | None
    measured: float | None
    peer: int | None = None
    note: str = ""
    begins_s: float = 0.0
    """Of the run: from when on it was asked for."""


@dataclass(frozen=True)
class EnvironmentReport:
    """The environment of a run; `document` is the environment file as it was given."""

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
    """The report of what the local runner compared."""
    figures = tuple(_figure(comparison) for comparison in comparisons)
    return EnvironmentReport(name, figures, tuple(notes), document or {})


def environment_document(environment: EnvironmentReport) -> dict[str, Any]:
    """What `environment.yaml` and the summary hold of it."""
    return {
        "name": environment.name,
        "figures": [
            {
                **asdict(figure),
                "requested": finite(figure.requested),
                "measured": finite(figure.measured),
            }
            for figure in environment.figures
        ],
        "notes": list(environment.notes),
        "document": dict(environment.document),
    }


def finite(value: float | None) -> float | None:
    """The value, or None where it is not known: JSON has neither NaN nor infinity."""
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

"""What is known of a job at one time, the same for all back ends, and its form in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Final, Literal

from dlion_api.status_names import ACCURACY, State
from dlion_results.summary.accuracy_name import accuracy_text

BackendName = Literal["local", "simulated", "kubernetes"]
ENDED: Final = frozenset({State.SUCCEEDED, State.FAILED})
_WIDTH, _HEIGHT = 240, 60
"""Size of the drawing, in pixels."""


@dataclass(frozen=True)
class JobWorker:
    """One worker of a job."""

    rank: int
    site: str
    name: str
    """`<site>/<group>-<index>`."""
    state: str
    """starting, training, waiting, lost or finished; empty: not known."""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """A job as it was when it was read; `Client.get_job` reads it again."""

    name: str
    """Name of its result folder; on Kubernetes the name of the DLionJob."""
    backend: BackendName
    state: str
    """A word of `dlion_api.status.State`, such as Training, Succeeded or Failed."""
    reason: str = ""
    """Why it is in that state, in one word (docs/results.md, docs/conditions.md)."""
    message: str = ""
    """Why, for people."""
    progress: float | None = None
    """Fraction of the run, 0 to 1; None: unknown, or its end cannot be predicted."""
    eta_s: float | None = None
    """Seconds left, of virtual time in a simulation; None: unknown."""
    accuracy: float | None = None
    """Mean over replicas on held-out data, 0 to 1; None before the first evaluation."""
    accuracy_name: str = ACCURACY
    """What people read for it: "accuracy", or R² of targets."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of `compile()` by name, as `accuracy`. On Kubernetes of this site's
    replicas, at most 16; else empty in lists."""
    loss: float | None = None
    """Mean over workers of the last training loss; None before the first step."""
    workers: tuple[JobWorker, ...] = ()
    result_folder: Path | None = None
    """None on Kubernetes."""
    created: datetime | None = None
    curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    """Seconds and mean accuracy, at most some hundred points. Empty on Kubernetes and in lists."""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.state in ENDED

    def _repr_html_(self) -> str:
        """A small table and the accuracy against time, for notebooks."""
        workers = ", ".join(f"{each.name} {each.state}" for each in self.workers[:16])
        more = f" and {len(self.workers) - 16} more" if len(self.workers) > 16 else ""
        rows = (
            ("state", f"{self.state} {f'({self.reason})' if self.reason else ''}"),
            ("progress", _percent(self.progress)),
            ("ETA", "" if self.eta_s is None else f"{self.eta_s:.0f} s"),
            (self.accuracy_name, self._accuracy_text()),
            # A program names them: perhaps as one of the others.
            *((name[:60], f"{value:.4g}") for name, value in [*self.metrics.items()][:16]),
            ("loss", "" if self.loss is None else f"{self.loss:.4g}"),
            ("workers", f"{workers}{more}"),
            ("message", self.message[:500]),
        )
        cells = "".join(
            f"<tr><th style='text-align:left'>{escape(name)}</th>"
            f"<td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in rows
            if value.strip()
        )
        title = escape(f"{self.name} ({self.backend})")
        drawing = _drawing(self.curve, self.accuracy_name)
        return f"<div><b>{title}</b><table>{cells}</table>{drawing}</div>"

    def _accuracy_text(self) -> str:
        known = self.accuracy is not None
        return accuracy_text(self.accuracy, self.accuracy_name) if known else ""


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def _drawing(curve: tuple[tuple[float, float], ...], name: str) -> str:
    """An SVG of the accuracy, 0 to 1, against time; empty with fewer than two points."""
    if len(curve) < 2 or curve[-1][0] <= curve[0][0]:
        return ""
    begin_s, end_s = curve[0][0], curve[-1][0]
    points = " ".join(
        f"{_WIDTH * (time_s - begin_s) / (end_s - begin_s):.1f},"
        f"{_HEIGHT * (1 - min(1.0, max(0.0, accuracy))):.1f}"
        for time_s, accuracy in curve
    )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' "
        f"aria-label='{escape(name)}, 0 to 1, from {begin_s:.0f} to {end_s:.0f} s'>"
        f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='none' stroke='#ccc'/>"
        f"<polyline points='{points}' fill='none' stroke='#1f77b4' stroke-width='2'/></svg>"
    )

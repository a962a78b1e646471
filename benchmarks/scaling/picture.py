"""Draw the runs: the rate at which Jobs are created, and the lags of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from one_run import Figures

_COLOURS = ("tab:blue", "tab:gray", "tab:orange")


def draw(found: Mapping[str, Sequence[Figures]], to: Path) -> None:
    """Draw a panel of created Jobs over time, and one of the idle lags, a line for each run."""
    mpl.rcParams["svg.hashsalt"] = "dlion"
    figure, (making, lags) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for (name, runs), colour in zip(found.items(), _COLOURS, strict=False):
        for run, label in zip(runs, [name, *[None] * len(runs)], strict=False):
            making.plot(run.made_at_s, range(1, len(run.made_at_s) + 1), color=colour, label=label)
            ordered = sorted(run.probe_lags_s)
            parts = [(number + 1) / len(ordered) for number in range(len(ordered))]
            lags.step(ordered, parts, where="post", color=colour, label=label)
    making.set(xlabel="seconds since the first manifest", ylabel="Jobs made by the operator")
    lags.set(xlabel="seconds from a change to its status", ylabel="part of the changes")
    lags.axvline(2.0, color="tab:red", linewidth=0.8, linestyle="--")
    for panel in (making, lags):
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, metadata={"Date": None})
    plt.close(figure)

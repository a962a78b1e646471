"""What the page shows of the workers' time: a stacked bar for each, and the ones waited for most.

With many workers, those of a site share a bar.
"""

from collections.abc import Sequence
from typing import Any, Final

from dlion_results.report.curve_charts import PageChart
from dlion_results.report.formats import percent, shortened
from dlion_results.report.palette import row_groups
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.tally import MAIN_PHASES, WorkerTally
from dlion_results.summary.time_parts import time_parts

PARTS: Final = (
    "computing", "waiting for others", "select", "encode", "send", "decode", "apply", "other",
)  # fmt: skip
"""Names of the parts of a bar, in its order."""
_WITHOUT_PHASES: Final = ("computing", "waiting for others", "exchange and the rest")
"""Parts of runs of older releases, which did not record the phases."""
_MAX_WAITED_FOR: Final = 8
_MAX_WORDS: Final = 8
"""Bars in the text for a screen reader."""


def time_bars(run: LoadedRun) -> PageChart:
    """A stacked bar of seconds by part for each worker, or for those of a site together."""
    by_rank = {worker.rank: worker for worker in run.workers}
    has_phases = any(worker.phase_s for worker in run.workers)
    names = PARTS if has_phases else _WITHOUT_PHASES
    rows, groups = [], row_groups(run)
    for group in groups:
        own = [_seconds(by_rank[rank], has_phases=has_phases) for rank in group.ranks]
        seconds = [sum(part) for part in zip(*own, strict=True)]
        if sum(seconds) > 0:
            values = [float(f"{part_s:.4g}") for part_s in seconds]
            rows.append({"n": group.name, "c": group.place, "v": values})
    title = f"Each {'worker' if len(groups) == len(run.workers) else 'site'}'s time"
    if not rows:
        return PageChart("parts", title, "", "No step was done.")
    caption = "From its first step to its last."
    if has_phases:
        caption += (
            " The exchange: select what to send, encode it, send it into queues, decode what came, "
            "apply it."
        )
    words = "; ".join(_words(row, names) for row in rows[:_MAX_WORDS])
    if len(rows) > _MAX_WORDS:
        words += f"; and {len(rows) - _MAX_WORDS} more"
    spec = {"kind": "parts", "parts": list(names), "rows": rows}
    return PageChart("parts", title, caption, f"{title}: {words}.", spec)


def waited_for(run: LoadedRun) -> list[tuple[str, int, float]]:
    """(name, colour, share of all waiting) of those that others waited for most."""
    groups = {rank: group for group in row_groups(run) for rank in group.ranks}
    parts: dict[tuple[str, int], float] = {}
    for entry in (run.summary["time_use"] or {"waited_for": []})["waited_for"]:
        if group := groups.get(entry["rank"]):
            key = group.name, group.place
            parts[key] = parts.get(key, 0.0) + entry["fraction"]
    ranked = sorted(parts.items(), key=lambda item: -item[1])[:_MAX_WAITED_FOR]
    return [(name, place, min(1.0, share)) for (name, place), share in ranked]


def _seconds(worker: WorkerTally, *, has_phases: bool) -> list[float]:
    """Seconds of a worker by part."""
    if not worker.steps:
        return [0.0] * (len(PARTS) if has_phases else len(_WITHOUT_PHASES))
    parts = time_parts(worker)
    phases = [parts[name] or 0.0 for name in MAIN_PHASES] if has_phases else []
    return [worker.compute_s, worker.waited_s, *phases, parts["other_s"] or 0.0]


def _words(row: dict[str, Any], names: Sequence[str]) -> str:
    total = sum(row["v"])
    shares = (f"{name} {percent(v / total)}" for name, v in zip(names, row["v"], strict=True) if v)
    return f"{shortened(row['n'], 60)} {', '.join(shares)}"

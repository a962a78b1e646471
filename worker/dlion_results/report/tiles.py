"""The row of figures below the headline: of one run, or of a few side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from dlion_results.report.formats import UNKNOWN, duration, figure, or_unknown, percent, size, whole
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.accuracy_name import accuracy_text, as_title, common_name
from dlion_results.summary.link_use import bytes_by_kind
from dlion_results.summary.privacy import max_spent, unknown_privacy

MAX_TILED_RUNS: Final = 4
"""More runs are compared in the table alone."""


@dataclass(frozen=True)
class TileValue:
    """One run's figure, and what explains it; `shares` are drawn as a bar."""

    text: str
    note: str = ""
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A figure of every run."""

    name: str
    values: tuple[TileValue, ...]


def tiles(runs: Sequence[LoadedRun]) -> list[Tile]:
    """The tiles; none for many runs."""
    if len(runs) > MAX_TILED_RUNS:
        return []
    time_name = "Time to the target" if any(run.summary["target"] for run in runs) else "Training"
    figures = {
        as_title(common_name(run.accuracy_name for run in runs)): _accuracy,
        time_name: _time,
        "Samples per second": _rate,
        "Sent": _sent,
        "Workers": _workers,
        "Time use": _time_use,
    }
    if any(worker["privacy"] for run in runs for worker in run.summary["workers"]):
        figures["Privacy"] = _privacy
    return [Tile(name, tuple(map(value, runs))) for name, value in figures.items()]


def shares(run: LoadedRun) -> tuple[float, ...]:
    """Parts of all workers' time: computing, waiting, the rest; empty without a step."""
    use = run.summary["time_use"]
    if use is None:
        return ()
    computed, waited = use["compute_fraction"], use["wait_fraction"]
    return computed, waited, max(0.0, 1 - computed - waited)


def _accuracy(run: LoadedRun) -> TileValue:
    accuracy = run.summary["accuracy"]
    count, spell = accuracy["replicas"], partial(accuracy_text, name=run.accuracy_name)
    if not count:
        return TileValue(UNKNOWN, "no replica was evaluated")
    notes = []
    if count > 1:
        least, most = spell(accuracy["min"]), spell(accuracy["max"])
        among = f"at all {count} replicas" if least == most else f"{least} to {most}"
        notes.append(among)
    if worst := worst_class(run):
        notes.append(f"worst class {percent(worst)}")
    return TileValue(spell(accuracy["mean"]), ", ".join(notes))


def worst_class(run: LoadedRun) -> float | None:
    """The least accuracy of any replica that counts in any class."""
    workers = [worker for worker in run.summary["workers"] if not worker["quarantine"]]
    each = [worker["accuracy"]["classes"] for worker in workers]
    return min((value for row in each for value in row if value is not None), default=None)


def _time(run: LoadedRun) -> TileValue:
    target, trained = run.summary["target"], duration(run.summary["training_s"])
    if not target:
        return TileValue(trained, f"{duration(run.summary['time_s'])} with the start")
    goal = accuracy_text(target["accuracy"], run.accuracy_name, 0)
    if target["training_time_s"] is None:
        return TileValue("missed", f"{goal} not reached in {trained}")
    sent = size(target["sent_bytes"])
    return TileValue(duration(target["training_time_s"]), f"{goal} with {sent} sent")


def _rate(run: LoadedRun) -> TileValue:
    return TileValue(
        figure(run.summary["samples_per_s"]), f"{whole(run.summary['samples'])} in all"
    )


def _sent(run: LoadedRun) -> TileValue:
    sent, span_s = run.summary["sent_bytes"], run.summary["training_s"]
    notes = [f"{size(sent / span_s)}/s"] if span_s else []
    total = sum(bytes_by_kind(run.summary["bytes"]).values())
    if total > sent:
        notes.append(f"{size(total)} on the links in all")
    return TileValue(size(sent), "; ".join(notes))


def _workers(run: LoadedRun) -> TileValue:
    sites = len({worker["site"] for worker in run.summary["workers"]})
    restarts = sum(max(0, worker["incarnations"] - 1) for worker in run.summary["workers"])
    note = f"at {sites} site{'s' * (sites != 1)}"
    if restarts:
        note += f", {restarts} restart{'s' * (restarts != 1)}"
    return TileValue(whole(len(run.workers)), note)


def _privacy(run: LoadedRun) -> TileValue:
    workers = run.summary["workers"]
    worst, unknown = max_spent(workers), len(unknown_privacy(workers))
    if worst is None:
        return TileValue("unknown" if unknown else "none")
    spent = worst["privacy"]
    note = f"at δ = {spent['delta']:g}, of the worker with most uses of a sample, {spent['uses']:,}"
    if not spent["complete"]:
        note += "; records of steps are missing"
    if unknown:
        note += f"; {whole(unknown)} more unknown"
    sign = "≤" if spent["complete"] else "at least"
    return TileValue(f"ε {sign} {figure(spent['epsilon'])}", note)


def _time_use(run: LoadedRun) -> TileValue:
    parts = shares(run)
    text = or_unknown(percent, parts[0] if parts else None, 0)
    if not parts:
        return TileValue(text, "no step was done")
    note = f"computing, {percent(parts[1], 0)} waiting for others"
    return TileValue(text, note, parts)

"""What the page shows of one run's links: their use over time, and maps of all pairs.

With many workers, those of a site stand together.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dlion_results.report.curve_charts import PageChart
from dlion_results.report.formats import percent, size
from dlion_results.report.palette import WorkerGroup, row_groups
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.curves import Points, at_times
from dlion_results.summary.link_use import KINDS
from dlion_results.summary.tally import LinkTally, WorkerTally, trusted_workers
from dlion_results.summary.time_parts import link_bytes

MAX_PANELS: Final = 12
MAX_BYTE_ROWS: Final = 20
BINS: Final = 60
_GREAT_LOSS: Final = 0.05
"""Share of lost segments with the darkest shade."""


@dataclass(frozen=True)
class MapCell:
    """One cell of a heat map: its text, and its shade from 0 to 1; None: nothing known."""

    text: str
    shade: float | None


@dataclass(frozen=True)
class HeatMap:
    """A table whose cells are shaded by their values."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[WorkerGroup, tuple[MapCell, ...]], ...]


@dataclass(frozen=True)
class UplinkCurves:
    """All links of some workers together, in bytes/s at the middle of equal intervals; NaN: not
    known."""

    sent: Points
    budget: Points
    bandwidth: Points


def uplinks(run: LoadedRun) -> PageChart:
    """Use, budget and bandwidth of each worker's links together, a panel per worker or site."""
    title, by_rank = "Uplinks over time", {worker.rank: worker for worker in run.workers}
    members = {group: [by_rank[rank] for rank in group.ranks] for group in row_groups(run)}
    senders = [group for group, own in members.items() if any(worker.links for worker in own)]
    if not senders or run.length_s <= 0:
        return PageChart("uplinks", title, "", "No worker sent anything.")
    shown = sorted(senders, key=lambda group: -sum(w.sent_bytes for w in members[group]))
    shown = [group for group in senders if group in shown[:MAX_PANELS]]
    edges_s = np.linspace(run.began_s, run.tally.end_s, BINS + 1)
    curves = {group: uplink_curves(members[group], edges_s) for group in shown}
    caption = (
        "All links together, one scale. Filled: sent. Solid: budget (bytes per step times steps "
        "per second). Dotted: measured bandwidth."
    )
    if len(shown) < len(senders):
        caption += f" The {len(shown)} of {len(senders)} that sent most."
    panels = [
        {"n": group.name, "c": group.place, "k": str(group.place), "sent": _digits(own.sent),
         "budget": _digits(own.budget), "bandwidth": _digits(own.bandwidth)}
        for group, own in curves.items()
    ]  # fmt: skip
    spec = {"kind": "panels", "x": _digits((edges_s[1:] + edges_s[:-1]) / 2 - run.began_s, 5),
            "end": run.length_s, "top": _top(curves.values()), "panels": panels}  # fmt: skip
    alt = f"{title}: " + ", ".join(
        f"{group.name} sent {size(sum(w.sent_bytes for w in members[group]))}" for group in shown
    )
    return PageChart("uplinks", title, caption, alt, spec)


def uplink_curves(workers: Sequence[WorkerTally], edges_s: Points) -> UplinkCurves:
    """Sums over all links of these workers."""
    middle_s, span_s = (edges_s[1:] + edges_s[:-1]) / 2, edges_s[1] - edges_s[0]
    sent, budget, bandwidth = (np.zeros(len(middle_s)) for _ in range(3))
    for worker in workers:
        for link in worker.links.values():
            points = np.concatenate((np.zeros((1, 5)), link.curve.points()))
            sent += np.diff(at_times(points, edges_s)) / span_s
            iterations_per_s = np.diff(at_times(points, edges_s, 4)) / span_s
            budget += _held(points, middle_s, 2) * iterations_per_s
            bandwidth += _held(points, middle_s, 3)
    return UplinkCurves(sent, budget, bandwidth)


def link_map(run: LoadedRun) -> HeatMap | None:
    """Mean rate between workers, sender by receiver; None without links."""
    spans_s = {w.rank: w.span_s or run.length_s or math.inf for w in run.workers}
    rates = _matrix(run, lambda rank, link: (link.sent_bytes / spans_s[rank], 1.0))
    if rates is None:
        return None
    top = max((total for row in rates for total, _ in row), default=0.0)
    cells = [
        [
            MapCell(f"{size(total)}/s", total / (top or 1)) if n else MapCell("", None)
            for total, n in row
        ]
        for row in rates
    ]
    caption = "Mean while the sender trained; of one that did not, over the run."
    return _heat_map(run, "Rate of each link", caption, cells)


def budget_map(run: LoadedRun) -> HeatMap | None:
    """Use of budgets, sender by receiver; None if no link had any."""
    parts = _matrix(run, lambda _, link: _budget_use(link))
    if parts is None or not any(allowed for row in parts for _, allowed in row):
        return None
    cells = [
        [
            MapCell(percent(sent / allowed, 0), min(1.0, sent / allowed)) if allowed > 0
            else MapCell("", None)
            for sent, allowed in row
        ]
        for row in parts
    ]  # fmt: skip
    caption = "Bytes sent over the sum of budgets; low: the links carry more than is sent."
    return _heat_map(run, "Use of each link's budget", caption, cells)


def byte_map(run: LoadedRun) -> HeatMap | None:
    """Bytes of the links that carried most, by kind; None without links."""
    groups = row_groups(run)
    place_of = {rank: place for place, group in enumerate(groups) for rank in group.ranks}
    sums: dict[tuple[int, int], Counter[str]] = {}
    for worker in run.workers:
        for peer, link in worker.links.items():
            if peer in place_of:
                pair = place_of[worker.rank], place_of[peer]
                sums.setdefault(pair, Counter()).update(link_bytes([link]))
    if not sums:
        return None
    pairs = sorted(sums, key=lambda pair: -sums[pair].total())[:MAX_BYTE_ROWS]
    top = max(max(sums[pair].values()) for pair in pairs) or 1
    rows = []
    for sender, receiver in pairs:
        counts = [sums[sender, receiver][f"{kind}_bytes"] for kind in KINDS]
        cells = tuple(MapCell(size(count), count / top) for count in counts)
        name = f"{groups[sender].name} → {groups[receiver].name}"
        rows.append((WorkerGroup(name, groups[sender].ranks, groups[sender].place), cells))
    caption = "Tables call gradient, weights and control sent; the others come beside them."
    if len(pairs) < len(sums):
        caption += f" The {len(pairs)} of {len(sums)} links that carried most."
    return HeatMap("Bytes of each link by kind", caption, KINDS, tuple(rows))


def loss_table(run: LoadedRun) -> HeatMap | None:
    """Loss and round trips of the links that lost most; None: no link has any."""
    groups = row_groups(run)
    place_of = {rank: place for place, group in enumerate(groups) for rank in group.ranks}
    links: dict[tuple[int, int], list[LinkTally]] = {}
    for worker in run.workers:
        for peer, link in worker.links.items():
            if peer in place_of and link.sent_segments:
                pair = place_of[worker.rank], place_of[peer]
                links.setdefault(pair, []).append(link)
    if not links:
        return None
    lost = {
        pair: sum(link.retransmitted_segments or 0 for link in own)
        / sum(link.sent_segments or 0 for link in own)
        for pair, own in links.items()
    }
    longest_s = {pair: max(link.round_trip_s or 0.0 for link in own) for pair, own in links.items()}
    pairs = sorted(links, key=lambda pair: (-lost[pair], -longest_s[pair]))[:MAX_BYTE_ROWS]
    rows = []
    for sender, receiver in pairs:
        own, pair = links[sender, receiver], (sender, receiver)
        known_s = [link.min_round_trip_s for link in own if link.min_round_trip_s is not None]
        shortest = f"{1000 * min(known_s):.3g} ms" if known_s else ""
        cells = (
            MapCell(percent(lost[pair], 2), min(1.0, lost[pair] / _GREAT_LOSS)),
            MapCell(shortest, None),
            MapCell(f"{1000 * longest_s[pair]:.3g} ms", None),
        )
        name = f"{groups[sender].name} → {groups[receiver].name}"
        rows.append((WorkerGroup(name, groups[sender].ranks, groups[sender].place), cells))
    caption = (
        "TCP segments that were sent again, on the connections open at the end of training; the "
        "longest round trip has the time in queues."
    )
    if len(pairs) < len(links):
        caption += f" The {len(pairs)} of {len(links)} links that lost most."
    columns = "lost", "shortest round trip", "longest round trip"
    return HeatMap("Loss and round trips of each link", caption, columns, tuple(rows))


def class_map(run: LoadedRun, *, most: int = 40) -> HeatMap | None:
    """Accuracy per class at the end; None if it was not reported, or for many classes."""
    classes = {w["rank"]: w["accuracy"]["classes"] for w in run.summary["workers"]}
    trusted = {worker.rank for worker in trusted_workers(run.workers)}
    count = max((len(row) for row in classes.values()), default=0)
    if not 0 < count <= most:
        return None
    rows = []
    for group in row_groups(run):
        counted = trusted.intersection(group.ranks) or group.ranks  # else a row of its own
        own = [classes[rank] for rank in counted if rank in classes]
        cells = []
        for label in range(count):
            known = [row[label] for row in own if label < len(row) and row[label] is not None]
            mean = sum(known) / len(known) if known else None
            cells.append(MapCell("" if mean is None else f"{mean * 100:.0f}", mean))
        rows.append((group, tuple(cells)))
    names = tuple(str(label) for label in range(count))
    caption = "Per cent of each class at the last evaluation; more colour is more."
    return HeatMap("Accuracy per class", caption, names, tuple(rows))


def _heat_map(
    run: LoadedRun, title: str, caption: str, cells: Sequence[Sequence[MapCell]]
) -> HeatMap:
    groups = row_groups(run)
    rows = tuple((group, tuple(row)) for group, row in zip(groups, cells, strict=True))
    text = f"{caption} Rows send, columns receive."
    return HeatMap(title, text, tuple(group.name for group in groups), rows)


def _matrix(run: LoadedRun, parts: Any) -> list[list[tuple[float, float]]] | None:
    """Sums of both `parts(rank, link)` from each group to each; None without links."""
    groups = row_groups(run)
    row_of = {rank: place for place, group in enumerate(groups) for rank in group.ranks}
    sums = np.zeros((len(groups), len(groups), 2))
    links = 0
    for worker in run.workers:
        for peer, link in worker.links.items():
            if peer in row_of:
                links += 1
                sums[row_of[worker.rank], row_of[peer]] += parts(worker.rank, link)
    if not links:
        return None
    return [[(float(first), float(second)) for first, second in row] for row in sums]


def _budget_use(link: LinkTally) -> tuple[float, float]:
    """Bytes sent, and budget times iterations, while there was a budget."""
    points = link.curve.points()
    if len(points) < 2:
        return 0.0, 0.0
    known = ~np.isnan(points[1:, 2])
    allowed = float((points[1:, 2] * np.diff(points[:, 4]))[known].sum())
    return float(np.diff(points[:, 1])[known].sum()), allowed


def _held(points: Points, times_s: Points, column: int) -> Points:
    """The last known value of the column at those times; NaN before the first."""
    known = points[1:][~np.isnan(points[1:, column])]
    if len(known) == 0:
        return np.full(len(times_s), np.nan)
    index = np.searchsorted(known[:, 0], times_s, side="right") - 1
    held: Points = np.where(index >= 0, known[np.maximum(index, 0), column], np.nan)
    return held


def _top(curves: Any) -> float:
    """The end of the common scale: all that was sent, and budgets but for their first peaks."""
    highest = 0.0
    for own in curves:
        highest = max(highest, float(own.sent.max()))
        for values in (own.budget, own.bandwidth):
            known = values[~np.isnan(values)]
            if len(known):
                highest = max(highest, float(np.quantile(known, 0.9)))
    return 1.08 * highest or 1.0


def _digits(values: Points, count: int = 4) -> list[float | None]:
    return [None if math.isnan(v) else float(f"{v:.{count}g}") for v in values.tolist()]

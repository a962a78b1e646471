"""Colours of runs and workers, and how many workers share one.

Eight hues for light paper and eight for dark, the same hue at the same place. Each has a contrast
of 3 to its paper, and any two differ for readers with protanopia and deuteranopia
(tests/unit/results/test_palette.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlion_api.names import Rank
from dlion_results.report.runs import LoadedRun

LIGHT: Final = (
    "#3473c3", "#cf4204", "#17a58b", "#812c6e", "#6c2cab", "#c18625", "#1496c3", "#952d22",
)  # fmt: skip
DARK: Final = (
    "#1f7dff", "#f38425", "#75face", "#c04c8c", "#a98bdb", "#fed73b", "#22d9f5", "#d84e3e",
)  # fmt: skip
LIGHT_PAPER: Final = "#ffffff"
DARK_PAPER: Final = "#161b22"
MAX_ROWS: Final = 24
"""More workers than these share rows of charts by site."""


@dataclass(frozen=True)
class WorkerGroup:
    """Workers that share a colour or a row: one of them, or those of one site."""

    name: str
    ranks: tuple[Rank, ...]
    place: int
    """Index of its colour."""


def css_colours(colours: Sequence[str]) -> str:
    """CSS variables `--c0` to `--c7`.

    >>> css_colours(["#123456"])
    '--c0: #123456;'
    """
    return " ".join(f"--c{place}: {value};" for place, value in enumerate(colours))


def coloured_groups(run: LoadedRun) -> list[WorkerGroup]:
    """What a colour stands for: a worker, or a site if there are more workers than colours."""
    return _groups(run, len(LIGHT))


def row_groups(run: LoadedRun) -> list[WorkerGroup]:
    """What a row of a chart or table stands for: a worker, or a site if they are many.

    Their colours are those of `coloured_groups`. Sites after `MAX_ROWS` share the last row.
    """
    colours = {rank: group.place for group in coloured_groups(run) for rank in group.ranks}
    groups = [
        WorkerGroup(group.name, group.ranks, colours[group.ranks[0]])
        for group in _groups(run, MAX_ROWS)
    ]
    if len(groups) <= MAX_ROWS:
        return groups
    rest = groups[MAX_ROWS - 1 :]
    ranks = tuple(rank for group in rest for rank in group.ranks)
    return [*groups[: MAX_ROWS - 1], WorkerGroup(f"{len(rest)} more", ranks, rest[0].place)]


def _groups(run: LoadedRun, most: int) -> list[WorkerGroup]:
    ranks = [worker.rank for worker in run.workers]
    if len(ranks) <= most:
        return [WorkerGroup(run.worker_name(rank), (rank,), i) for i, rank in enumerate(ranks)]
    sites: dict[str, list[Rank]] = {}
    for rank in ranks:
        sites.setdefault(run.sites.get(rank, "not in the manifest"), []).append(rank)
    if len(sites) == 1:  # one site distinguishes nothing: its groups may
        sites = {}
        for rank in ranks:
            sites.setdefault(run.worker_name(rank).rpartition("-")[0], []).append(rank)
    return [WorkerGroup(name, tuple(own), i) for i, (name, own) in enumerate(sites.items())]

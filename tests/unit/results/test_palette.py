"""Tests of the page's colours.

They contrast with its paper, light and dark. They also differ for readers with protanopia and
deuteranopia. A worker keeps its colour, and many workers share one.

Source of the simulation: Machado, Oliveira and Fernandes 2009, severity 1. Differences are
Euclidean in Oklab (Ottosson 2020).
"""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from dlion_results.report.palette import (
    DARK,
    DARK_PAPER,
    LIGHT,
    LIGHT_PAPER,
    MAX_ROWS,
    coloured_groups,
    row_groups,
)
from dlion_results.report.runs import LoadedRun
from dlion_results.summary.summary import Ending, summarise
from dlion_results.summary.tally import RunTally
from synthetic_run import Story, description

SIGHTS = {
    "usual": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]),
}  # fmt: skip
TO_CONES = np.array([
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
])  # fmt: skip
TO_LAB = np.array([
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
])  # fmt: skip
THEMES = {"light": (LIGHT, LIGHT_PAPER), "dark": (DARK, DARK_PAPER)}


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    return TO_LAB @ np.cbrt(TO_CONES @ np.clip(sight @ linear(colour), 0, 1))


@pytest.mark.parametrize("theme", THEMES)
def test_every_colour_has_the_contrast_required_of_graphics(theme: str) -> None:
    colours, paper = THEMES[theme]
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_any_two_colours_differ_and_the_first_four_strongly(theme: str, sight: str) -> None:
    simulated = [lab(colour, SIGHTS[sight]) for colour in THEMES[theme][0]]
    for (i, one), (j, other) in itertools.combinations(enumerate(simulated), 2):
        assert np.linalg.norm(one - other) > (0.12 if max(i, j) < 4 else 0.08), (i, j)


def test_the_test_of_colours_can_fail() -> None:
    red, green = (lab(colour, SIGHTS["deuteranopia"]) for colour in ("#c0502d", "#7c7a2e"))
    assert np.linalg.norm(red - green) < 0.08


def groups_of(workers: int) -> LoadedRun:
    job = description(Story(workers=workers))
    tally = RunTally(worker.rank for worker in job.workers())
    return LoadedRun("a", job, tally, summarise(job, tally, ending=Ending("x")), None, "")


@pytest.mark.parametrize(("workers", "colours", "rows"), [(8, 8, 8), (24, 2, 24), (96, 2, 2)])
def test_many_workers_share_colours_and_rows_by_site(workers: int, colours: int, rows: int) -> None:
    run = groups_of(workers)
    by_colour, by_row = coloured_groups(run), row_groups(run)
    assert (len(by_colour), len(by_row)) == (colours, rows)
    assert len(by_row) <= MAX_ROWS
    for groups in (by_colour, by_row):
        assert sorted(rank for group in groups for rank in group.ranks) == list(range(workers))
    place = {rank: group.place for group in by_colour for rank in group.ranks}
    for group in by_row:
        assert {place[rank] for rank in group.ranks} == {group.place}


def variables() -> dict[str, dict[str, str]]:
    """CSS variables of the page in light and in dark."""
    text = files("dlion_results.report").joinpath("static", "page.css").read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")[:2]
    own = [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in (light, dark)]
    return {
        "light": {**own[0], "paper": LIGHT_PAPER},
        "dark": {**own[0], **own[1], "paper": DARK_PAPER},
    }


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize(
    ("text", "below"),
    [
        *itertools.product(("ink", "faint", "good", "bad"), ("paper", "page")),
        ("on0", "use0"), ("on1", "use1"), ("on2", "use2"), ("ink", "heat"), ("ink", "grid"),
    ],
)  # fmt: skip
def test_texts_contrast_with_their_background(text: str, below: str, theme: str) -> None:
    colours = variables()[theme]
    low, high = sorted((luminance(colours[text]), luminance(colours[below])))
    assert (high + 0.05) / (low + 0.05) >= 4.5

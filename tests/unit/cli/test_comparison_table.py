"""Test the table of a comparison: it fits a terminal and marks targets that were not reached."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from dlion_cli.comparison.comparison_matrix import Matrix, Variant
from dlion_cli.comparison.comparison_table import comparison_table
from dlion_results.comparison import VariantRow, VariantRun


def figures(seed: int, time_s: float | None, accuracy: float) -> VariantRun:
    sent = None if time_s is None else 1e6 * time_s
    return VariantRun(seed, time_s, sent, accuracy, accuracy, accuracy, 0.01, 9e6, 0.5)


def matrix(*names: str) -> Matrix:
    return Matrix(
        file=Path("job.yaml"),
        variants=tuple(Variant(name, ()) for name in names),
        environments=("homo-b",),
        assignments=(),
        seeds=(1, 2, 3),
        learning_rates=(0.1,),
        target_accuracy=0.5,
        seconds=100,
    )


def shown(rows: list[VariantRow]) -> str:
    console = Console(width=80, file=StringIO())
    names = [row.variant for row in rows]
    console.print(comparison_table("homo-b", rows, matrix(*names), ideal="ideal"))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_each_column_has_median_range_and_its_share_of_the_ideal() -> None:
    dlion = VariantRow("homo-b", "dlion", 0.1, tuple(figures(s, 20.0 * s, 0.6) for s in (1, 2, 3)))
    ideal = VariantRow("homo-b", "ideal", 0.1, tuple(figures(s, 10.0, 0.7) for s in (1, 2, 3)))
    text = shown([dlion, ideal])
    for words in ("40", "20 to 60", "25.0 %", "100.0 %", "60.0", "70.0"):
        assert words in text, words
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_target_that_few_seeds_reach_has_no_median() -> None:
    times = (30.0, None, None)
    row = VariantRow(
        "homo-b", "gaia", 0.1, tuple(figures(s, t, 0.4) for s, t in enumerate(times, 1))
    )
    text = shown([row])
    assert "2 never" in text
    assert "—" in text

"""The tables of a comparison in one environment: median (range) over seeds of each figure, and one
column held against the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from dlion_cli.comparison_matrix import Matrix
from dlion_cli.figures import NOT_KNOWN, share, size
from dlion_worker.results.comparison import Against, Row, Spread


def comparison_table(environment: str, rows: Sequence[Row], matrix: Matrix, *, ideal: str) -> Table:
    """One line for each column of the comparison, in the order in which they were named."""
    title = f"{environment}: {len(matrix.seeds)} seeds, {matrix.seconds:g} virtual seconds"
    table = Table(show_lines=True, title=Text(title, style="bold"), title_justify="left")
    for name in ("", f"seconds\nto {matrix.target_accuracy:.0%}", "of\nideal", "bytes\nto it",
                 "accuracy\nat the end", "drift", "rate"):  # fmt: skip
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    best = next((row for row in rows if row.variant == ideal), None)
    ideal_s = None if best is None else best.spread("time_to_target_s").median
    for row in rows:
        time_s = row.spread("time_to_target_s")
        of_ideal = share(ideal_s / time_s.median) if ideal_s and time_s.median else NOT_KNOWN
        table.add_row(
            row.variant,
            spelt(time_s, lambda value: f"{value:.0f}"),
            of_ideal,
            spelt(row.spread("bytes_to_target"), size),
            spelt(row.spread("accuracy"), lambda value: f"{value * 100:.1f}"),
            spelt(row.spread("drift"), lambda value: f"{value:.3f}"),
            f"{row.learning_rate:g}",
        )
    return table


def against_table(held: str, others: Sequence[Against]) -> Table:
    """How much sooner and how much more accurate the held column is than each other one."""
    table = Table(title=Text(f"{held} against", style="bold"), title_justify="left")
    for name in ("", "times as soon\nat the target", "accuracy\nabove, points", "relative"):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for other in others:
        table.add_row(
            other.variant,
            speed_up(other),
            NOT_KNOWN if other.points is None else f"{other.points:+.1f}",
            NOT_KNOWN if other.relative is None else f"{other.relative:+.1%}",
        )
    return table


def speed_up(one: Against) -> str:
    """A ratio of medians, or its least where only the other never got there.

    >>> speed_up(Against("gaia", 2.25, None, None)), speed_up(Against("ako", None, None, None, 3.0))
    ('2.25', 'over 3.00')
    """
    if one.speed_up is not None:
        return f"{one.speed_up:.2f}"
    return NOT_KNOWN if one.at_least is None else f"over {one.at_least:.2f}"


def spelt(spread: Spread, form: Callable[[float], str]) -> str:
    """Median; below it the range, and how many seeds have no value.

    >>> spelt(Spread(2.0, 1.0, 4.0), lambda value: f"{value:.0f}").splitlines()
    ['2', '1 to 4']
    >>> spelt(Spread(None, 3.0, 3.0, missing=2), lambda value: f"{value:.0f}").splitlines()
    ['—', '3 to 3', '2 never']
    """
    if spread.least is None or spread.most is None:
        return NOT_KNOWN
    middle = NOT_KNOWN if spread.median is None else form(spread.median)
    if spread.least == spread.most and not spread.missing:
        return middle
    lines = [middle, f"{form(spread.least)} to {form(spread.most)}"]
    if spread.missing:
        lines.append(f"{spread.missing} never")
    return "\n".join(lines)

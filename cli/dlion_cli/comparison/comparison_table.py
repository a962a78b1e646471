"""Tables of a comparison: median and range over seeds, and one column compared with the others."""

from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from dlion_api.status_names import ACCURACY
from dlion_cli.comparison.comparison_matrix import Matrix
from dlion_cli.terminal.formatting import UNKNOWN, format_bytes, format_percent
from dlion_results.comparison import RelativeResult, Spread, VariantRow, accuracy_name_of
from dlion_results.summary.accuracy_name import accuracy_text, goal_text


def comparison_table(
    environment: str, rows: Sequence[VariantRow], matrix: Matrix, *, ideal: str
) -> Table:
    """One row for each column of the comparison, in the order of the options."""
    seeds = f"{len(matrix.seeds)} seed{'s' * (len(matrix.seeds) > 1)}"
    title = f"{environment}: {seeds}, {matrix.seconds:g} virtual seconds"
    table = Table(show_lines=True, title=Text(title, style="bold"), title_justify="left")
    accuracy = accuracy_name_of(rows)
    goal = goal_text(matrix.target_accuracy, accuracy)
    for name in ("", f"seconds\nto {goal}", "of\nideal", "samples\nto it", "bytes\nto it",
                 f"{accuracy}\nat the end", "last\ndrift", "rate"):  # fmt: skip
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    best = next((row for row in rows if row.variant == ideal), None)
    ideal_s = None if best is None else best.spread("time_to_target_s").median
    for row in rows:
        time_s = row.spread("time_to_target_s")
        of_ideal = format_percent(ideal_s / time_s.median) if ideal_s and time_s.median else UNKNOWN
        table.add_row(
            row.variant,
            format_spread(time_s, lambda value: f"{value:.0f}"),
            of_ideal,
            format_spread(row.spread("samples_to_target"), lambda value: f"{value:,.0f}"),
            format_spread(row.spread("bytes_to_target"), format_bytes),
            format_spread(
                row.spread("accuracy"), lambda value: accuracy_text(value, accuracy).rstrip(" %")
            ),
            format_spread(row.spread("drift"), lambda value: f"{value:.3f}"),
            f"{row.learning_rate:g}",
        )
    return table


def against_table(subject: str, others: Sequence[RelativeResult], accuracy: str) -> Table:
    """Speed-up and gain of the subject over each other column; `accuracy`: that figure's name."""
    in_points = accuracy == ACCURACY
    gain = f"{accuracy}\nabove{', points' if in_points else ''}"
    table = Table(title=Text(f"{subject} against", style="bold"), title_justify="left")
    for name in ("", "times as soon\nat the target", gain, *["relative"] * in_points):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for other in others:
        relative = UNKNOWN if other.relative is None else f"{other.relative:+.1%}"
        table.add_row(
            other.variant,
            format_speed_up(other),
            UNKNOWN if other.points is None else _gain(other.points, in_points=in_points),
            *[relative] * in_points,
        )
    return table


def _gain(points: float, *, in_points: bool) -> str:
    return f"{points:+.1f}" if in_points else f"{points / 100:+.2f}"


def format_speed_up(one: RelativeResult) -> str:
    """A ratio of medians, or a lower bound if only the other never reached the target.

    >>> format_speed_up(RelativeResult("gaia", 2.25, None, None))
    '2.25'
    >>> format_speed_up(RelativeResult("ako", None, None, None, 3.0))
    'over 3.00'
    """
    if one.speed_up is not None:
        return f"{one.speed_up:.2f}"
    return UNKNOWN if one.at_least is None else f"over {one.at_least:.2f}"


def format_spread(spread: Spread, form: Callable[[float], str]) -> str:
    """The median; below it the range, and the number of seeds without a value.

    >>> format_spread(Spread(2.0, 1.0, 4.0), lambda value: f"{value:.0f}").splitlines()
    ['2', '1 to 4']
    >>> format_spread(Spread(None, 3.0, 3.0, missing=2), lambda value: f"{value:.0f}").splitlines()
    ['—', '3 to 3', '2 never']
    """
    if spread.least is None or spread.most is None:
        return UNKNOWN
    middle = UNKNOWN if spread.median is None else form(spread.median)
    if spread.least == spread.most and not spread.missing:
        return middle
    lines = [middle, f"{form(spread.least)} to {form(spread.most)}"]
    if spread.missing:
        lines.append(f"{spread.missing} never")
    return "\n".join(lines)

"""The section PROBLEMS of `dlion describe`."""

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dlion_cli.findings.job_problem import JobProblem, Severity

_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def problem_parts(problems: Sequence[JobProblem], notes: Sequence[str]) -> list[RenderableType]:
    """The heading, notes on what is missing, the problems with what to do, and an empty line."""
    parts: list[RenderableType] = [Text("PROBLEMS", style="bold")]
    parts += (Text(note, style="yellow") for note in notes)
    if not problems:
        return [*parts, Text("none found", style="dim" if notes else "green"), Text("")]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for each in problems:
        cell = Text(f"{each.object}: ", style="bold")
        cell.append(each.message, style="not bold")
        cell.append(f"\n→ {each.advice}", style="not bold")
        if each.command:
            cell.append(f"\n  {each.command}", style="not bold cyan")
        grid.add_row(Text(each.severity, style=_STYLES[each.severity]), cell)
    return [*parts, grid, Text("")]

"""Command line options that several commands share, and a type of option."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from dlion_cli.terminal.completion import complete_assignments


class FiniteFloatRange(click.FloatRange):
    """A finite number within bounds; click's own range accepts `nan`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


result_folder: Final = click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR",
    help="Result folder, new or empty. Default: runs/<job>-<time>.",
)  # fmt: skip

data_root: Final = click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path(),
    metavar="DIR",
    help="Base of relative paths of data and startFrom. Default: the working "
    "directory.",
)  # fmt: skip


def assignments(where: str) -> Callable[..., Any]:
    """The option `--set`; `where` names the documents in which it sets a field."""
    return click.option(
        "--set", "assignments", multiple=True, metavar="PATH=VALUE",
        shell_complete=complete_assignments,
        help=f"Set a field of {where}. An empty value removes the field. Repeatable.",
    )  # fmt: skip


calibration: Final = click.option(
    "--calibration", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Costs of a step from `dlion calibrate`.",
)  # fmt: skip

step_overhead: Final = click.option(
    "--step-overhead", "step_overhead_s", type=FiniteFloatRange(0, 1000), metavar="SECONDS",
    help="Fixed cost of a step, in seconds of a core. Default: 0, or the "
    "calibration's.",
)  # fmt: skip

threads: Final = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N",
    help="Gradients computed in parallel. Default: all cores.",
)  # fmt: skip

no_report: Final = click.option("--no-report", is_flag=True, help="Do not create report.html.")

wide_output: Final = click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json"]), default="table",
    help="wide has all columns.",
)  # fmt: skip

output: Final = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table",
    help="Output format.",
)  # fmt: skip

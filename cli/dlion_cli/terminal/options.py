"""Command line options that several commands share, and a type of option."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import click


class FiniteFloatRange(click.FloatRange):
    """A finite number within bounds; click's own range accepts `nan`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


result_folder: Final = click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR",
    help="Result folder, new or empty. Default: runs/<job>-<time>.",
)  # fmt: skip

data_root: Final = click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Base of relative paths of data. Default: the working directory.",
)  # fmt: skip

threads: Final = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N",
    help="Gradients computed in parallel; does not change results. Default: all cores.",
)  # fmt: skip

no_report: Final = click.option("--no-report", is_flag=True, help="Do not create report.html.")

output: Final = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table",
    help="Output format.",
)  # fmt: skip

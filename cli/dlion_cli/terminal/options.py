"""Command line options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

result_folder: Final = click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR",
    help="Result folder, new or empty. Default: runs/<job>-<time>.",
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

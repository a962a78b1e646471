"""`dlion compare`: the same job under several policies and seeds, simulated side by side.

Owns which runs there are, in which order, and what is printed; a run is a process of
`dlion simulate`, and what is read off runs is `results.comparison`'s.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dlion_api.atomic_file import write_atomically
from dlion_api.exit_codes import ExitCode
from dlion_cli import options
from dlion_cli.comparing import Runs
from dlion_cli.comparison_columns import IDEAL, Wanted, check, matrix_of
from dlion_cli.comparison_folder import COMPARISON, PICTURE, locked, refuse_foreign
from dlion_cli.comparison_matrix import Matrix
from dlion_cli.comparison_table import against_table, comparison_table
from dlion_cli.finite import FiniteRange
from dlion_cli.interruption import interruptible
from dlion_cli.manifests import STDIN, read_document
from dlion_worker.results.comparison import Row, against
from dlion_worker.simulation.calibration import read_costs


class _List(click.ParamType[tuple[Any, ...]]):
    """Items between commas, none of them twice."""

    name = "list"

    def __init__(self, item: type[str | float], *, may_be_empty: bool = False) -> None:
        self._item, self._may_be_empty = item, may_be_empty

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            items = tuple(self._item(text.strip()) for text in value.split(",") if text.strip())
            if any(isinstance(item, float) and not math.isfinite(item) for item in items):
                raise ValueError
        except ValueError:
            self.fail(f"{value!r}: not numbers between commas", param, ctx)
        if not (items or self._may_be_empty) or len(set(items)) < len(items):
            self.fail(f"{value!r}: give at least one, and none twice", param, ctx)
        return items


class _Rates(click.ParamType[tuple[str, tuple[float, ...]]]):
    """Learning rates between commas, of the policy or the column named before them, or of all."""

    name = "rates"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[float, ...]]:
        if isinstance(value, tuple):
            return value
        name, colon, rates = value.rpartition(":")
        if colon and not name.strip():
            self.fail(f"{value!r}: nothing stands before the colon", param, ctx)
        return name.strip(), _List(float).convert(rates, param, ctx)


@click.command(short_help="Compare policies in simulated runs.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--policies", type=_List(str, may_be_empty=True), default="dlion,full", show_default=True,
    metavar="A,B,…",
    help=f"Exchange policies by name; '{IDEAL}' is one machine with all the cores and no network. "
    "Empty, where there are variants: these alone.",
)  # fmt: skip
@click.option(
    "--variant", "variants", multiple=True, metavar="NAME:PATH=VALUE[;PATH=VALUE…]",
    help="Another column: the manifest with these settings. Repeatable.",
)  # fmt: skip
@click.option(
    "--environment", "-e", "environments", multiple=True, required=True, metavar="NAME|FILE",
    help="Where; repeatable.",
)  # fmt: skip
@click.option(
    "--set", "assignments", multiple=True, metavar="PATH=VALUE",
    help="A field of the manifest, for all. Repeatable.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(1, 100), default=5, show_default=True,
              help="Seeds 1 to N.")  # fmt: skip
@click.option(
    "--target-accuracy", type=FiniteRange(0, 1, min_open=True), metavar="A",
    help="Time and bytes to this mean over replicas. Default: the manifest's stop.targetAccuracy.",
)  # fmt: skip
@click.option(
    "--seconds", type=FiniteRange(0, min_open=True), metavar="S",
    help="Virtual seconds of every run. Default: the manifest's stop.maxSeconds.",
)  # fmt: skip
@click.option(
    "--learning-rates", "rates", type=_Rates(), multiple=True, metavar="[POLICY|COLUMN:]X,Y,…",
    help="Try these with seed 1 for the first column of each policy, and take the best for all "
    "columns of that policy. Repeatable, with other rates for a POLICY, or for a COLUMN, for which "
    "the best is then chosen by itself. Default: the manifest's.",
)  # fmt: skip
@click.option(
    "--tuned-in", metavar="NAME|FILE",
    help="The environment in which learning rates are tried. Default: the first.",
)  # fmt: skip
@click.option(
    "--against", "held", metavar="NAME",
    help="Hold this column against each other one: speed-up, accuracy relative and in points.",
)  # fmt: skip
@click.option(
    "--step-overhead", "step_overhead_s", type=FiniteRange(0, 1000), metavar="SECONDS",
    help="As for dlion simulate, for all runs.",
)  # fmt: skip
@click.option(
    "--calibration", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="As for dlion simulate, for all runs.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N",
              help="Runs at a time. Default: all cores.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
    help="Where runs and figures go. What is there already and fits is not run again.",
)  # fmt: skip
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of data are taken from here. Default: the working directory.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check everything, run nothing; say how many runs.")
@options.output
def compare(
    file: Path,
    policies: tuple[str, ...],
    variants: tuple[str, ...],
    environments: tuple[str, ...],
    assignments: tuple[str, ...],
    seeds: int,
    target_accuracy: float | None,
    seconds: float | None,
    rates: tuple[tuple[str, tuple[float, ...]], ...],
    tuned_in: str | None,
    held: str | None,
    step_overhead_s: float | None,
    calibration: Path | None,
    jobs: int | None,
    out: Path,
    data_root: Path,
    dry_run: bool,
    output: str,
) -> int:
    """Simulate the job of manifest FILE under several policies, in several seeds, side by side.

    All columns have the same model, data, split, links and global batch. Printed: median and range
    over seeds of the time and the bytes to the target, the accuracy at the end, and the drift. The
    median of an even number of seeds is the lower of the two values in the middle.
    Ctrl-C ends the runs; the same command goes on where it was.

    \b
    dlion compare examples/digits.yaml -e quickstart --policies dlion,full,none,ideal \\
        --seeds 3 --target-accuracy 0.9 --seconds 400 --out runs/compared
    dlion compare job.yaml -e hetero-sys-a -e homo-b --out runs/techniques \\
        --variant "no transfer:knowledgeTransfer.policy=none"
    """
    if str(file) == STDIN:
        raise click.UsageError("a comparison reads its manifest again and again: give a file")
    document, _ = read_document(file)
    matrix = matrix_of(
        Wanted(
            file=file,
            document=document,
            policies=policies,
            variants=variants,
            environments=environments,
            assignments=assignments,
            seeds=seeds,
            target_accuracy=target_accuracy,
            seconds=seconds,
            rates=rates,
            tuned_in=tuned_in,
            step_overhead_s=step_overhead_s,
            calibration=calibration,
        )
    )
    check(matrix, document, held, out=out, data_root=data_root)
    if calibration is not None:
        read_costs(calibration)  # what is wrong with it is told before anything is run
    if dry_run:
        _tell_plan(matrix, output)
        return ExitCode.OK
    with interruptible(), locked(out):
        refuse_foreign(out, matrix.folders(), matrix.as_one())  # now nobody else is in it
        console = Console(stderr=output == "json")
        cores = len(os.sched_getaffinity(0))
        rows = Runs(out, data_root=data_root, jobs=jobs or cores, console=console).compared(matrix)
        _show(rows, matrix, out, output, held)
    return ExitCode.OK


def _tell_plan(matrix: Matrix, output: str) -> None:
    """What a dry run says."""
    if output != "json":
        click.echo(f"all is well; runs: at most {matrix.run_count()}")
        return
    plan = {
        "columns": [variant.name for variant in matrix.variants],
        "environments": list(matrix.environments),
        "seeds": list(matrix.seeds),
        "targetAccuracy": matrix.target_accuracy,
        "seconds": matrix.seconds,
        "runsAtMost": matrix.run_count(),
    }
    click.echo(json.dumps(plan, indent=2))


def _show(rows: list[Row], matrix: Matrix, out: Path, output: str, held: str | None) -> None:
    """Keeps all figures, draws them and prints them; `held` is the column held against others."""
    from dlion_worker.results.report.comparison_picture import write_comparison

    by_place = {(row.environment, row.variant): row for row in rows}
    compared = {
        (row.environment, row.variant): against(by_place[row.environment, held], row, matrix.goal)
        for row in rows
        if held is not None and row.variant != held
    }
    result = {
        "command": ["dlion", "compare", *sys.argv[2:]],
        "targetAccuracy": matrix.target_accuracy,
        "seconds": matrix.seconds,
        "held": held,
        "rows": [
            {
                **row.document(),
                **({"against": asdict(compared[place])} if place in compared else {}),
            }
            for place, row in by_place.items()
        ],
    }
    text = json.dumps(result, indent=2) + "\n"
    write_atomically(out / COMPARISON, text.encode(), mode=0o644)
    write_comparison(rows, matrix.goal, out / PICTURE)
    if output == "json":
        click.echo(text, nl=False)
        return
    console = Console()
    for environment in dict.fromkeys(row.environment for row in rows):
        own = [row for row in rows if row.environment == environment]
        console.print(comparison_table(environment, own, matrix, ideal=IDEAL))
        if held is not None:
            places = [(environment, row.variant) for row in own if row.variant != held]
            console.print(against_table(held, [compared[place] for place in places]))
    click.echo(f"Figures: {out / COMPARISON}")
    click.echo(f"Picture: {out / PICTURE}")

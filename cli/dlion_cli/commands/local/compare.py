"""`dlion compare`: simulate the same job under several policies and seeds.

Owns the options and the output. Each run is a `dlion simulate` process; `comparison` reads
its figures.
"""

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
from dlion_cli.comparison.comparison_folder import (
    PICTURE,
    lock_folder,
    reject_foreign_files,
)
from dlion_cli.comparison.comparison_matrix import Matrix, PlannedRun
from dlion_cli.comparison.comparison_request import (
    IDEAL,
    ComparisonRequest,
    build_matrix,
    check_matrix,
)
from dlion_cli.comparison.comparison_runner import ComparisonRunner
from dlion_cli.comparison.comparison_table import against_table, comparison_table
from dlion_cli.inputs.manifests import STDIN, read_document
from dlion_cli.terminal import options
from dlion_cli.terminal.completion import complete_environments, complete_policies
from dlion_cli.terminal.interruption import interruptible
from dlion_results.comparison import VariantRow, Verdict, accuracy_name_of, relative_result, verdict
from dlion_results.run_folder.layout import COMPARISON, REPORT
from dlion_simulator.calibration.calibration import read_costs


class _CommaSeparatedList(click.ParamType[tuple[Any, ...]]):
    """Distinct items separated by commas."""

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
            self.fail(f"{value!r}: not numbers separated by commas", param, ctx)
        if not (items or self._may_be_empty) or len(set(items)) < len(items):
            self.fail(f"{value!r}: give at least one, without duplicates", param, ctx)
        return items


class _LearningRates(click.ParamType[tuple[str, tuple[float, ...]]]):
    """Comma-separated learning rates, with an optional policy or column name before a colon."""

    name = "rates"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, tuple[float, ...]]:
        if isinstance(value, tuple):
            return value
        name, colon, rates = value.rpartition(":")
        if colon and not name.strip():
            self.fail(f"{value!r}: no name before the colon", param, ctx)
        return name.strip(), _CommaSeparatedList(float).convert(rates, param, ctx)


@click.command(short_help="Compare policies in simulated runs.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--policies", type=_CommaSeparatedList(str, may_be_empty=True), default="adaptive,full",
    show_default=True, metavar="A,B,…", shell_complete=complete_policies,
    help=f"Exchange policies to compare; '{IDEAL}' is one machine with all the cores and no "
    "network.",
)  # fmt: skip
@click.option(
    "--variant", "variants", multiple=True, metavar="NAME:PATH=VALUE[;PATH=VALUE…]",
    help="Add a column: the manifest with these settings. Repeatable.",
)  # fmt: skip
@click.option(
    "--environment", "-e", "environments", multiple=True, required=True, metavar="NAME|FILE",
    shell_complete=complete_environments,
    help="Environment of the runs. Repeatable.",
)  # fmt: skip
@options.assignments("the manifest, for all columns")
@click.option("--seeds", type=click.IntRange(1, 100), default=5, show_default=True,
              help="Number of seeds; they are 1 to N.")  # fmt: skip
@click.option(
    "--target-accuracy", type=options.FiniteFloatRange(0, 1, min_open=True), metavar="A",
    help="Mean accuracy over replicas. Default: the manifest's stop.targetAccuracy.",
)  # fmt: skip
@click.option(
    "--seconds", type=options.FiniteFloatRange(0, min_open=True), metavar="S",
    help="Virtual duration of a run. Default: the manifest's stop.maxSeconds.",
)  # fmt: skip
@click.option(
    "--learning-rates", "rates", type=_LearningRates(), multiple=True,
    metavar="[POLICY|COLUMN:]X,Y,…",
    help="Learning rates to choose from, for all columns, a policy or one column. "
    "Further ones are tried if the best is the first or the last. Repeatable. "
    "Default: the manifest's rate.",
)  # fmt: skip
@click.option(
    "--tuned-in", metavar="NAME|FILE",
    help="Environment in which all learning rates are chosen. Default: in each its own.",
)  # fmt: skip
@click.option(
    "--tuning-seeds", type=click.IntRange(1, 100), default=3, show_default=True,
    help="Number of seeds for choosing them; they are 101 and following.",
)  # fmt: skip
@click.option(
    "--against", "subject", metavar="NAME",
    help="Compare this column with each other one.",
)  # fmt: skip
@options.step_overhead
@options.calibration
@click.option("--jobs", type=click.IntRange(1, 1024), metavar="N",
              help="Parallel runs. Default: the number of cores.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
    help="Folder for runs and figures; finished runs are reused.",
)  # fmt: skip
@options.data_root
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check, and print the number of runs only.",
)
@options.no_report
@options.output
def compare(
    file: Path,
    subject: str | None,
    calibration: Path | None,
    jobs: int | None,
    out: Path,
    data_root: Path,
    dry_run: bool,
    no_report: bool,
    output: str,
    **others: Any,
) -> int:
    """Simulate the job of manifest FILE under several policies and seeds, and compare the results.

    The table has the median and range over seeds of time and bytes to the target, accuracy and
    drift, and names the column that won. For an even number of seeds, the median is the lower of
    the two middle values. Ctrl-C ends the runs; the same command continues.

    \b
    dlion compare examples/digits.yaml -e quickstart --policies dlion,full,none,ideal \\
        --seeds 3 --target-accuracy 0.9 --seconds 400 --out runs/compared
    """
    if str(file) == STDIN:
        raise click.UsageError("a comparison reads its manifest several times: give a file")
    document, _ = read_document(file)
    request = ComparisonRequest(file=file, document=document, calibration=calibration, **others)
    matrix = build_matrix(request)
    check_matrix(matrix, document, subject, out=out, data_root=data_root)
    if calibration is not None:
        read_costs(calibration)  # report its errors before the first run
    if dry_run:
        _print_plan(matrix, output)
        return ExitCode.OK
    with interruptible(), lock_folder(out):
        # Again: from now on the lock keeps other comparisons out.
        reject_foreign_files(out, matrix.folders(), matrix.aggregated_environments())
        console = Console(stderr=output == "json")
        cores = len(os.sched_getaffinity(0))
        rows = ComparisonRunner(
            out, data_root=data_root, jobs=jobs or cores, console=console
        ).comparison_rows(matrix)
        _show(rows, matrix, out, output, subject, with_report=not no_report)
    return ExitCode.OK


def _print_plan(matrix: Matrix, output: str) -> None:
    if output != "json":
        click.echo(f"all is well; runs: {matrix.run_count()}, more if further rates are tried")
        return
    plan = {
        "columns": [variant.name for variant in matrix.variants],
        "environments": list(matrix.environments),
        "seeds": list(matrix.seeds),
        "targetAccuracy": matrix.target_accuracy,
        "seconds": matrix.seconds,
        "runs": matrix.run_count(),
    }
    click.echo(json.dumps(plan, indent=2))


def _show(
    rows: list[VariantRow],
    matrix: Matrix,
    out: Path,
    output: str,
    subject: str | None,
    *,
    with_report: bool,
) -> None:
    """Write, draw and print all figures; `subject` is the column of --against."""
    from dlion_results.report.comparison_picture import write_comparison

    by_place = {(row.environment, row.variant): row for row in rows}
    compared = {
        (row.environment, row.variant): relative_result(
            by_place[row.environment, subject], row, matrix.goal
        )
        for row in rows
        if subject is not None and row.variant != subject
    }
    verdicts = _verdicts(rows, matrix)
    result = {
        "command": ["dlion", "compare", *sys.argv[2:]],
        "targetAccuracy": matrix.target_accuracy,
        "seconds": matrix.seconds,
        "held": subject,
        "verdicts": {name: asdict(each) for name, each in verdicts.items()},
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
    report = _write_report(rows, matrix, out, verdicts) if with_report else None
    if output == "json":
        click.echo(text, nl=False)
        return
    console = Console()
    for environment in dict.fromkeys(row.environment for row in rows):
        own = [row for row in rows if row.environment == environment]
        console.print(comparison_table(environment, own, matrix, ideal=IDEAL))
        if subject is not None:
            places = [(environment, row.variant) for row in own if row.variant != subject]
            others = [compared[place] for place in places]
            console.print(against_table(subject, others, accuracy_name_of(own)))
        if environment in verdicts:
            click.echo(f"{environment}: {verdicts[environment].text}")
    click.echo(f"Figures: {out / COMPARISON}")
    click.echo(f"Picture: {out / PICTURE}")
    if report is not None:
        click.echo(f"Report: {report}")


def _verdicts(rows: list[VariantRow], matrix: Matrix) -> dict[str, Verdict]:
    """Verdicts by environment. One machine without a network does not compete."""
    found = {}
    for environment in dict.fromkeys(row.environment for row in rows):
        own = [row for row in rows if row.environment == environment and row.variant != IDEAL]
        if (judged := verdict(own, matrix.goal)) is not None:
            found[environment] = judged
    return found


def _write_report(
    rows: list[VariantRow], matrix: Matrix, out: Path, verdicts: dict[str, Verdict]
) -> Path | None:
    """The page of the runs with the first seed; None if all of them have diverged."""
    from dlion_results.report.page import write_report

    variants = {variant.name: variant for variant in matrix.variants}
    several = len({row.environment for row in rows}) > 1
    runs = {
        f"{row.variant}{f' in {Path(row.environment).stem}' * several}": PlannedRun(
            variants[row.variant], row.environment, row.learning_rate, row.figures[0].seed
        )
        for row in rows
        if not row.figures[0].diverged
    }
    if not runs:
        return None
    folders = [out / run.folder for run in runs.values()]
    title = "; ".join(f"{name}: {each.text}" for name, each in verdicts.items())
    return write_report(folders, out / REPORT, labels=[*runs], title=title)

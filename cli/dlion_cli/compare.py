"""`dlion compare`: the same job under several policies and seeds, simulated side by side.

Owns which runs there are, in which order, and what is printed; a run is a process of
`dlion simulate`, and what is read off runs is `results.comparison`'s.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job
from dlion_cli import options
from dlion_cli.comparing import Matrix, Planned, Runs, Variant, by_themselves
from dlion_cli.comparison_table import against_table, comparison_table
from dlion_cli.interruption import interruptible
from dlion_cli.manifests import STDIN, apply_set, load_manifest, read_document
from dlion_cli.run import tell_unreached
from dlion_worker.environments import load_environment
from dlion_worker.policies.catalogue import find
from dlion_worker.results.comparison import Goal, Row, against
from dlion_worker.simulation.calibration import read_costs

IDEAL = "ideal"
COMPARISON = "comparison.json"
PICTURE = "comparison.svg"


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
    "--target-accuracy", type=click.FloatRange(0, 1, min_open=True), metavar="A",
    help="Time and bytes to this mean over replicas. Default: the manifest's stop.targetAccuracy.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), metavar="S",
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
    "--step-overhead", "step_overhead_s", type=click.FloatRange(0, 1000), metavar="SECONDS",
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
    over seeds of the time and the bytes to the target, the accuracy at the end, and the drift.
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
    job = load_manifest(apply_set(document, assignments), source=str(file), lines=None)
    goal = _goal(job, file, target_accuracy, seconds)
    columns = (
        *_policy_variants(policies, job.spec.exchange.policy),
        *(_variant(text, document, assignments) for text in variants),
    )
    matrix = Matrix(
        file=file,
        variants=by_themselves(columns, [name for name, _ in rates]),
        environments=environments,
        assignments=(*assignments, f"trainer.stop={{maxSeconds: {goal.at_s!r}}}"),
        seeds=tuple(range(1, seeds + 1)),
        learning_rates=dict(rates).get("", (job.spec.trainer.optimizer.learning_rate,)),
        target_accuracy=goal.target_accuracy,
        seconds=goal.at_s,
        family_rates={name: own for name, own in rates if name},
        tuned_in=tuned_in or environments[0],
        calibration=calibration,
        step_overhead_s=step_overhead_s,
    )
    _check(matrix, document, held)
    if calibration is not None:
        read_costs(calibration)  # what is wrong with it is told before anything is run
    if dry_run:
        click.echo(f"all is well; runs: at most {matrix.run_count()}")
        return ExitCode.OK
    with interruptible():
        console = Console(stderr=output == "json")
        cores = len(os.sched_getaffinity(0))
        rows = Runs(out, data_root=data_root, jobs=jobs or cores, console=console).compared(matrix)
    _show(rows, matrix, out, output, held)
    return ExitCode.OK


def _goal(job: Job, file: Path, target_accuracy: float | None, seconds: float | None) -> Goal:
    """As asked for, else the manifest's. Raises: SpecError where neither says it."""
    stop = job.spec.trainer.stop
    seconds = seconds or stop.max_seconds
    target_accuracy = target_accuracy or stop.target_accuracy
    for value, flag, path in (
        (seconds, "--seconds", "maxSeconds"),
        (target_accuracy, "--target-accuracy", "targetAccuracy"),
    ):
        if value is None:
            problem = Problem(f"spec.trainer.stop.{path}", "is not given", advice=f"Give {flag}")
            raise SpecError([problem], source=str(file))
    return Goal(float(target_accuracy or 0), float(seconds or 0))


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


def _policy_variants(names: tuple[str, ...], own: str) -> tuple[Variant, ...]:
    """A column for each policy; what the manifest says of `own`, its policy, holds for that one."""
    variants = []
    for name in names:
        settings: tuple[str, ...] = ()
        if name not in (IDEAL, own):
            find(name, source="--policies")
            weighting = ("exchange.weighting=dlion_ratio",) if name == "dlion-published" else ()
            bare = (
                "exchange.parameters={}",
                "exchange.residual=none",
                "exchange.propagation=all",
            )
            settings = (f"exchange.policy={name}", *bare, *weighting)
        variants.append(Variant(name, settings, is_ideal=name == IDEAL, family=name))
    return tuple(variants)


def _variant(text: str, document: dict[str, Any], assignments: tuple[str, ...]) -> Variant:
    name, colon, settings = text.partition(":")
    if not colon or not name.strip() or "=" not in settings:
        raise click.UsageError(f"--variant {text!r}; allowed: NAME:PATH=VALUE[;PATH=VALUE…]")
    parts = tuple(part.strip() for part in settings.split(";") if part.strip())
    name = name.strip()
    job = load_manifest(
        apply_set(document, (*assignments, *parts)), source=f"--variant {name}", lines=None
    )
    return Variant(name, parts, family=job.spec.exchange.policy)


def _check(matrix: Matrix, document: dict[str, Any], held: str | None) -> None:
    """Every column fits its manifest and every environment the job, before anything is run."""
    names = [variant.name for variant in matrix.variants]
    if not names:
        raise click.UsageError("nothing to compare: give --policies or --variant")
    if held is not None and held not in names:
        raise click.UsageError(f"--against {held!r}; allowed: {', '.join(names)}")
    unused = set(matrix.family_rates) - {variant.family for variant in matrix.variants}
    if unused:
        known = dict.fromkeys((*(variant.family for variant in matrix.variants), *names))
        raise click.UsageError(
            f"--learning-rates for {min(unused)!r}; columns and their policies that have no "
            f"other rates of their own: {', '.join(known)}"
        )
    folders = [
        Planned(variant, environment, 0.0, 1).folder
        for environment in matrix.environments
        for variant in matrix.variants
    ]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise click.UsageError(
            f"two columns or environments would have the same folder, {twice.parent.parent}: give "
            "them other names"
        )
    for environment in dict.fromkeys((matrix.tuned_in, *matrix.environments)):
        loaded = load_environment(environment)
        rates = [(variant, rate) for variant in matrix.variants for rate in matrix.grid(variant)]
        for variant, rate in rates:
            job = load_manifest(
                apply_set(document, Planned(variant, environment, rate, 1).settings(matrix)),
                source=f"{matrix.file}, {variant.name}",
                lines=None,
            )
            if not variant.is_ideal:
                loaded.plan(
                    job.workers(),
                    machine_cores=None,
                    duration_s=job.spec.trainer.stop.max_seconds,
                    source=str(matrix.file),
                )
                loaded.check(job, source=str(matrix.file))
        tell_unreached(loaded, matrix.seconds)

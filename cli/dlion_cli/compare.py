"""`dlion compare`: the same job under several policies and seeds, simulated side by side.

Owns which runs there are, in which order, and what is printed; a run is a process of
`dlion simulate`, and what is read off runs is `results.comparison`'s.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import Job
from dlion_cli.comparing import Matrix, Planned, Runs, Variant
from dlion_cli.comparison_table import comparison_table
from dlion_cli.interruption import interruptible
from dlion_cli.manifests import STDIN, apply_set, load_manifest, read_document
from dlion_cli.run import program_root_of
from dlion_worker.environments import load_environment
from dlion_worker.policies.catalogue import find
from dlion_worker.results.comparison import Row

IDEAL = "ideal"
COMPARISON = "comparison.json"


class _List(click.ParamType[tuple[Any, ...]]):
    """Items between commas, none of them twice."""

    name = "list"

    def __init__(self, item: type[str | float]) -> None:
        self._item = item

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            items = tuple(self._item(text.strip()) for text in value.split(",") if text.strip())
        except ValueError:
            self.fail(f"{value!r}: not numbers between commas", param, ctx)
        if not items or len(set(items)) < len(items):
            self.fail(f"{value!r}: give at least one, and none twice", param, ctx)
        return items


@click.command(short_help="Compare policies in simulated runs.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--policies", type=_List(str), default="dlion,full", show_default=True, metavar="A,B,…",
    help=f"Exchange policies by name; '{IDEAL}' is one machine with all the cores and no network.",
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
    "--learning-rates", type=_List(float), default=None, metavar="X,Y,…",
    help="Try these for each column, with seed 1 in the first environment, and take the best. "
    "Default: the manifest's.",
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
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table",
              help="What is printed at the end.")  # fmt: skip
def compare(
    file: Path,
    policies: tuple[str, ...],
    variants: tuple[str, ...],
    environments: tuple[str, ...],
    assignments: tuple[str, ...],
    seeds: int,
    target_accuracy: float | None,
    seconds: float | None,
    learning_rates: tuple[float, ...] | None,
    jobs: int | None,
    out: Path,
    data_root: Path,
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
    matrix = Matrix(
        file=file,
        variants=(
            *_policy_variants(policies, job.spec.exchange.policy),
            *(_variant(text) for text in variants),
        ),
        environments=environments,
        assignments=(*assignments, f"trainer.stop={{maxSeconds: {seconds!r}}}"),
        seeds=tuple(range(1, seeds + 1)),
        learning_rates=learning_rates or (job.spec.trainer.optimizer.learning_rate,),
        target_accuracy=float(target_accuracy or 0),
        seconds=float(seconds or 0),
        program_file=_program_file(job, file),
    )
    _check(matrix, document)
    with interruptible():
        console = Console(stderr=output == "json")
        cores = len(os.sched_getaffinity(0))
        rows = Runs(out, data_root=data_root, jobs=jobs or cores, console=console).compared(matrix)
    _show(rows, matrix, out, output)
    return ExitCode.OK


def _show(rows: list[Row], matrix: Matrix, out: Path, output: str) -> None:
    """Keeps all figures and prints them."""
    result = {
        "command": ["dlion", "compare", *sys.argv[2:]],
        "targetAccuracy": matrix.target_accuracy,
        "seconds": matrix.seconds,
        "rows": [row.document() for row in rows],
    }
    text = json.dumps(result, indent=2) + "\n"
    write_atomically(out / COMPARISON, text.encode(), mode=0o644)
    if output == "json":
        click.echo(text, nl=False)
        return
    console = Console()
    for environment in dict.fromkeys(row.environment for row in rows):
        own = [row for row in rows if row.environment == environment]
        console.print(comparison_table(environment, own, matrix, ideal=IDEAL))
    click.echo(f"Figures: {out / COMPARISON}")


def _policy_variants(names: tuple[str, ...], own: str) -> tuple[Variant, ...]:
    """A column for each policy; what the manifest says of `own`, its policy, holds for that one."""
    variants = []
    for name in names:
        settings: tuple[str, ...] = ()
        if name not in (IDEAL, own):
            find(name, source="--policies")
            weighting = ("exchange.weighting=dlion_ratio",) if name == "dlion-published" else ()
            bare = ("exchange.parameters={}", "exchange.residual=none")
            settings = (f"exchange.policy={name}", *bare, *weighting)
        variants.append(Variant(name, settings, is_ideal=name == IDEAL))
    return tuple(variants)


def _program_file(job: Job, file: Path) -> Path | None:
    program = job.spec.trainer.program.file
    return program_root_of(job, file, None) / program if program else None


def _variant(text: str) -> Variant:
    name, colon, settings = text.partition(":")
    if not colon or not name.strip() or "=" not in settings:
        raise click.UsageError(f"--variant {text!r}; allowed: NAME:PATH=VALUE[;PATH=VALUE…]")
    return Variant(
        name.strip(), tuple(part.strip() for part in settings.split(";") if part.strip())
    )


def _check(matrix: Matrix, document: dict[str, Any]) -> None:
    """Every column fits its manifest and every environment the job, before anything is run."""
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
    for environment in matrix.environments:
        loaded = load_environment(environment)
        for variant, rate in itertools.product(matrix.variants, matrix.learning_rates):
            job = load_manifest(
                apply_set(document, Planned(variant, environment, rate, 1).settings(matrix)),
                source=f"{matrix.file}, {variant.name}",
                lines=None,
            )
            if not variant.is_ideal:
                loaded.plan(
                    job.workers(), machine_cores=None, duration_s=job.spec.trainer.stop.max_seconds
                )
                loaded.check(job, source=str(matrix.file))

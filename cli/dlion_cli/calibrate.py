"""`dlion calibrate`: what a step of a job costs on this machine, for the simulator.

Owns the command and its table; the measurement is `dlion_worker.simulation.calibration`'s.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from dlion_api.exit_codes import ExitCode
from dlion_api.spec.trainer import BUILTINS
from dlion_cli import options
from dlion_cli.interruption import interruptible
from dlion_cli.manifests import apply_set, load_manifest, read_document
from dlion_cli.run import program_root_of
from dlion_worker.results.storage import check_writable, write_whole
from dlion_worker.simulation import calibration
from dlion_worker.training import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlion_worker.simulation.calibration import Calibration, Estimate

DEFAULT_BATCHES = (8, 16, 32, 64, 128, 256)
MOST_BATCH = 65_536
DEFAULT_BUILTIN = "cipher"


class _Batches(click.ParamType[tuple[int, ...]]):
    """At least two different sizes between commas."""

    name = "batches"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = sorted({int(text) for text in value.split(",") if text.strip()})
        except ValueError:
            self.fail(f"{value!r}: not whole numbers between commas", param, ctx)
        if len(sizes) < 2 or not 1 <= sizes[0] <= sizes[-1] <= MOST_BATCH:
            self.fail(f"{value!r}: give two or more sizes from 1 to {MOST_BATCH}", param, ctx)
        return tuple(sizes)


@click.command(short_help="Measure what a step costs here.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--builtin", type=click.Choice(BUILTINS),
    help="Without FILE: this built-in program, on images of chance.  [default: cipher]",
)  # fmt: skip
@click.option(
    "--set", "assignments", multiple=True, metavar="PATH=VALUE",
    help="Change a field of the manifest. Repeatable.",
)  # fmt: skip
@click.option(
    "--batches", type=_Batches(), default=",".join(map(str, DEFAULT_BATCHES)), metavar="N,N,…",
    show_default=True, help="Batch sizes to measure.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(3, 1000), default=7, show_default=True,
    help="How often each size is measured; more narrow the confidence.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Keep it as JSON, for `dlion simulate --calibration`.",
)  # fmt: skip
@click.option(
    "--data-root", type=click.Path(path_type=Path, file_okay=False), default=Path(), metavar="DIR",
    help="Relative paths of data are taken from here. Default: the working directory.",
)  # fmt: skip
@options.output
def calibrate(
    file: Path | None,
    builtin: str | None,
    assignments: tuple[str, ...],
    batches: tuple[int, ...],
    rounds: int,
    out: Path | None,
    data_root: Path,
    output: str,
) -> int:
    """Measure what a local step of a job costs on one core of this machine: a + b x batch.

    Real steps (gradient and update, compiled, on one thread) of several batch sizes are timed in
    CPU seconds, in several rounds, and the law is fitted to all. a is what a step costs whatever
    its batch, b what a sample adds; 1/b is an environment's samplesPerSPerCore. The residual says
    how well the law holds and how noisy the machine is: above some 10 %, measure again when less
    else is going on.

    \b
    dlion calibrate examples/digits.yaml --out digits.json
    dlion simulate examples/digits.yaml -e quickstart --calibration digits.json
    """
    if file is not None and builtin is not None:
        raise click.UsageError("--builtin is for measuring without a FILE")
    if file is None and assignments:
        raise click.UsageError("--set changes a manifest: give its FILE")
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no folder {out.parent}. Make it first")
    if out is not None:
        check_writable(out)  # before minutes of measuring
    console = Console(stderr=True)
    with interruptible():
        for name, value in threads.environment(1.0).items():
            os.environ.setdefault(name, value)
        # Without a thread that draws: its CPU time would be the steps'.
        with Live("compiling", console=console, auto_refresh=False, transient=True) as status:
            program, step = _step(file, builtin, assignments, data_root, max(batches))
            observations = calibration.measure(
                step,
                batches,
                rounds=rounds,
                on_observation=lambda one: status.update(
                    f"round {one.round_number} of {rounds}: batch {one.batch_size}", refresh=True
                ),
            )
    result = calibration.fit(observations, program=program, machine=_machine())
    text = json.dumps(result.document(), indent=2) + "\n"
    if output == "json":
        click.echo(text, nl=False)
    else:
        _show(result)
    if out is not None:  # at last: what was measured is on the screen even where this fails
        write_whole(out, text.encode())
        click.echo(f"Calibration: {out}", err=output == "json")
    return ExitCode.OK


def _step(
    file: Path | None,
    builtin: str | None,
    assignments: tuple[str, ...],
    data_root: Path,
    most_samples: int,
) -> tuple[str, Callable[[int], None]]:
    from dlion_worker.simulation import steps  # TensorFlow: only when all else is right

    if file is None:
        name = builtin or DEFAULT_BUILTIN
        return name, steps.step_of_builtin(name, most_samples=most_samples)
    document, lines = read_document(file)
    job = load_manifest(
        apply_set(document, assignments), source=str(file), lines=None if assignments else lines
    )
    root = program_root_of(job, file, None)
    program = job.spec.trainer.program
    name = program.builtin or program.module or program.file or job.key.name
    return name, steps.step_of_job(job, data_root=data_root.resolve(), program_root=root)


def _machine() -> str:
    """The processor's name, as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _show(result: Calibration) -> None:
    console = Console()
    table = Table(title=f"{result.program} on one core of {result.machine}")
    for column in ("batch", "ms per step", "least", "most", "by the law"):
        table.add_column(column, justify="right")
    fixed_s, sample_s = result.fixed_core_s, result.per_sample_core_s
    for batch_size in sorted({one.batch_size for one in result.observations}):
        costs_ms = sorted(
            1e3 * one.cpu_s for one in result.observations if one.batch_size == batch_size
        )
        law_ms = 1e3 * (fixed_s.value + batch_size * sample_s.value)
        shown = (costs_ms[len(costs_ms) // 2], costs_ms[0], costs_ms[-1], law_ms)
        table.add_row(str(batch_size), *(f"{value:.3g}" for value in shown))
    console.print(table)
    click.echo(f"a = {_words(fixed_s)} ms a step, b = {_words(sample_s)} ms a sample (95 %)")
    click.echo(
        f"samplesPerSPerCore: {result.samples_per_s_per_core:.4g}, "
        f"--step-overhead {fixed_s.value:.4g}"
    )
    click.echo(
        f"noise: {result.residual_fraction:.1%} of a step (root mean square of measured / law - 1);"
        f" wall time / CPU time {result.wall_per_cpu:.2f}"
    )


def _words(estimate: Estimate) -> str:
    value, low, high = (1e3 * v for v in (estimate.value, estimate.low, estimate.high))
    return f"{value:.3g} ({low:.3g} to {high:.3g})"

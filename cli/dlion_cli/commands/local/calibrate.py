"""`dlion calibrate`: measure the cost of a job's step on this machine, for the simulator."""

import json
import os
import platform
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from dlion_api.spec.trainer import BUILTINS
from dlion_cli.inputs.downloads import fetch_downloads
from dlion_cli.inputs.manifests import read_job
from dlion_cli.inputs.required_files import find_program_root
from dlion_cli.terminal import options
from dlion_cli.terminal.interruption import interruptible
from dlion_results.run_folder.storage import check_writable, write_whole
from dlion_simulator.calibration import calibration
from dlion_simulator.calibration.calibration import Calibration, Estimate
from dlion_worker.training import threads

DEFAULT_BATCHES = (8, 16, 32, 64, 128, 256)
MAX_BATCH_SIZE = 65_536
DEFAULT_BUILTIN = "cipher"


class _BatchSizes(click.ParamType[tuple[int, ...]]):
    """At least two different sizes, separated by commas."""

    name = "batches"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = sorted({int(text) for text in value.split(",") if text.strip()})
        except ValueError:
            self.fail(f"{value!r}: not integers separated by commas", param, ctx)
        if len(sizes) < 2 or not 1 <= sizes[0] <= sizes[-1] <= MAX_BATCH_SIZE:
            self.fail(f"{value!r}: give two or more sizes from 1 to {MAX_BATCH_SIZE}", param, ctx)
        return tuple(sizes)


@click.command(short_help="Measure the cost of a step on this machine.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--builtin", type=click.Choice(BUILTINS),
    help="Without FILE: this built-in program, on random images.  [default: cipher]",
)  # fmt: skip
@options.assignments("the manifest, e.g. exchange.policy=full")
@click.option(
    "--batches", type=_BatchSizes(), default=",".join(map(str, DEFAULT_BATCHES)), metavar="N,N,…",
    show_default=True, help="Batch sizes to measure.",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(3, 1000), default=7, show_default=True,
    help="Measurements of each size.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the result for `dlion simulate --calibration`.",
)  # fmt: skip
@options.data_root
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
) -> None:
    """Measure the cost of a job's local step on one core of this machine: a + b x batch.

    a is the fixed cost of a step in CPU seconds, b that of a sample; 1/b is an environment's
    samplesPerSPerCore. With a residual above 10 %, measure again on an idle machine.

    \b
    dlion calibrate examples/digits.yaml --out digits.json
    dlion simulate examples/digits.yaml -e quickstart --calibration digits.json
    """
    if file is not None and builtin is not None:
        raise click.UsageError("--builtin and FILE exclude each other")
    if file is None and assignments:
        raise click.UsageError("--set needs a manifest: give FILE")
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"--out {out}: there is no folder {out.parent}. Create it first")
    if out is not None:
        check_writable(out)  # measuring takes minutes
    console = Console(stderr=True)
    with interruptible():
        for name, value in threads.environment(1.0).items():
            os.environ.setdefault(name, value)
        # No refresh thread: its CPU time would count as the steps'.
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
    if out is not None:  # last: if this fails, the result is already printed
        write_whole(out, text.encode())
        click.echo(f"Calibration: {out}", err=output == "json")
        simulate = f"dlion simulate FILE --environment NAME --calibration {shlex.quote(str(out))}"
        click.echo(f"next: {simulate}", err=output == "json")


def _step(
    file: Path | None,
    builtin: str | None,
    assignments: tuple[str, ...],
    data_root: Path,
    max_samples: int,
) -> tuple[str, Callable[[int], None]]:
    from dlion_simulator.calibration import timed_steps

    if file is None:
        name = builtin or DEFAULT_BUILTIN
        return name, timed_steps.builtin_step(name, max_samples=max_samples)
    job = read_job(file, assignments)
    root = find_program_root(job, file, None)
    fetch_downloads(job)
    program = job.spec.trainer.program
    name = program.builtin or program.module or program.file or job.key.name
    return name, timed_steps.job_step(job, data_root=data_root.resolve(), program_root=root)


def _machine() -> str:
    """The processor's name as the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _show(result: Calibration) -> None:
    console = Console()
    table = Table(title=escape(f"{result.program} on one core of {result.machine}"))
    for column in ("batch", "ms per step", "min", "max", "fitted"):
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
    click.echo(
        f"a = {_format_estimate(fixed_s)} ms a step, "
        f"b = {_format_estimate(sample_s)} ms a sample (95 %)"
    )
    click.echo(
        f"samplesPerSPerCore: {result.samples_per_s_per_core:.4g}, "
        f"--step-overhead {fixed_s.value:.4g}"
    )
    click.echo(
        f"noise: {result.residual_fraction:.1%} of a step "
        f"(root mean square of measured / fitted - 1); "
        f"wall time / CPU time {result.wall_per_cpu:.2f}"
    )


def _format_estimate(estimate: Estimate) -> str:
    value, low, high = (1e3 * v for v in (estimate.value, estimate.low, estimate.high))
    return f"{value:.3g} ({low:.3g} to {high:.3g})"

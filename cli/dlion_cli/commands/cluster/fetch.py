"""`dlion fetch`: download a job's model, or all results, from the site's keeper."""

import contextlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dlion_api.errors import UnavailableError
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, name_argument
from dlion_cli.inputs.unpacking import unpack
from dlion_cli.pod_streams.keeper_files import find_keeper, packed_files, site_of
from dlion_cli.terminal.failures import install_advice
from dlion_cli.views.job_status import JobStatus


@click.command()
@name_argument()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Target folder; its files are replaced. Default: the job's name.",
)  # fmt: skip
@click.option("--site", metavar="NAME", help="Site of the model. Default: this cluster's site.")
@click.option(
    "--format", "form", type=click.Choice(["keras", "savedmodel", "tflite"]), default="keras",
    help="Model format; TensorFlow converts to savedmodel and tflite on this machine.",
)  # fmt: skip
@click.option(
    "--all", "everything", is_flag=True, help="Download the whole result folder (docs/results.md)."
)
@click.option(
    "--run", "run_id", metavar="RUN", help="ID of an earlier run. Default: the job's runId."
)
@cluster_options
def fetch(
    jobs: JobClient,
    name: str,
    out: Path | None,
    site: str | None,
    form: str,
    everything: bool,
    run_id: str | None,
) -> None:
    """Download the model of job NAME: DIR/model.keras and its description, DIR/model.json.

    The files come from the keeper's pod at this cluster's site. They replace older files only after
    all SHA-256 digests were verified: a failed download changes nothing.

    \b
    dlion fetch cifar10 --out model
    dlion fetch cifar10 --format tflite
    dlion fetch cifar10 --all --out results && dlion report results
    """
    if everything and (site or form != "keras"):
        raise click.UsageError("--all downloads everything unchanged: remove --site and --format")
    if form != "keras":
        _require_tensorflow(form)
    job = JobStatus(jobs.get(name))
    run = run_id or job.run_id
    keeper = find_keeper(jobs, job, run)
    folder = f"models/{site or site_of(keeper)}"
    chunks = packed_files(jobs, keeper, run, "." if everything else folder)
    with contextlib.closing(chunks):
        made = _receive(chunks, out or Path(name), "" if everything else f"{folder}/")
    for path in _converted(made, form):
        click.echo(str(path))


def _receive(chunks: Iterable[bytes], out: Path, prefix: str) -> list[Path]:
    console = Console(stderr=True)
    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(done: int, whole: int) -> None:
            progress.update(task, completed=done, total=whole or None)

        return unpack(chunks, out, rename=lambda n: n.removeprefix(prefix), on_progress=show)


def _require_tensorflow(form: str) -> None:
    """Raises: UnavailableError, before anything is downloaded."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UnavailableError(
            f"--format {form} needs TensorFlow here. {install_advice('worker')}; or "
            "download the model unchanged, with --format keras"
        )


def _converted(made: list[Path], form: str) -> list[Path]:
    models = [path for path in made if path.name == "model.keras"]
    if form == "keras" or not models:
        return made
    from dlion_worker.training import converting

    which: Any = form
    return [*made, *(converting.convert(path, which) for path in models)]

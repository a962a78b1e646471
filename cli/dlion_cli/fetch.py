"""`dlion fetch`: a job's model, or all its results, from the site's keeper to this machine."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dlion_api import cluster_names
from dlion_api.errors import UnavailableError
from dlion_cli.cluster_options import cluster_options, name_argument
from dlion_cli.job_status import JobStatus
from dlion_cli.unpacking import unpack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlion_cli.cluster_jobs import Document, Jobs

_PACK = "dlion_worker.keeper.pack"


@click.command()
@name_argument()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Where to; files there are replaced. Default: a folder with the job's name.",
)  # fmt: skip
@click.option("--site", metavar="NAME", help="Whose model. Default: this cluster's site.")
@click.option(
    "--format", "form", type=click.Choice(["keras", "savedmodel", "tflite"]), default="keras",
    help="savedmodel and tflite are made here, by TensorFlow.",
)  # fmt: skip
@click.option(
    "--all", "everything", is_flag=True, help="The whole result folder (docs/results.md)."
)
@click.option("--run", "run_id", metavar="RUN", help="Of an earlier run. Default: the job's runId.")
@cluster_options
def fetch(
    jobs: Jobs,
    name: str,
    out: Path | None,
    site: str | None,
    form: str,
    everything: bool,
    run_id: str | None,
) -> int:
    """Fetch what job NAME has trained: DIR/model.keras and DIR/model.json, which says what it is.

    Files come from the keeper's pod at this cluster's site. They are checked against their SHA-256
    and replace older ones only once all are whole: a broken fetch leaves what was there.

    \b
    dlion fetch cifar10 --out model
    dlion fetch cifar10 --format tflite
    dlion fetch cifar10 --all --out results && dlion report results
    """
    if everything and (site or form != "keras"):
        raise click.UsageError("--all brings everything as it is: leave --site and --format away")
    if form != "keras":
        _require_tensorflow(form)
    job = JobStatus(jobs.get(name))
    run = run_id or job.run_id
    keeper = _keeper(jobs, job, run)
    own_site = str(keeper["metadata"]["labels"].get(cluster_names.SITE_LABEL, ""))
    folder = f"models/{site or own_site}"
    chunks = jobs.cluster.command(
        jobs.cluster.namespace,
        str(keeper["metadata"]["name"]),
        cluster_names.KEEPER_CONTAINER,
        ["python", "-m", _PACK, "--run", run, "." if everything else folder],
    )
    with contextlib.closing(chunks):
        made = _taken(chunks, out or Path(name), "" if everything else f"{folder}/")
    for path in _converted(made, form):
        click.echo(str(path))
    return 0


def _keeper(jobs: Jobs, job: JobStatus, run: str) -> Document:
    """The pod of that run's keeper that runs, or of another's: a claim has the results of all runs.

    Raises: UnavailableError where there is none.
    """
    labels = {cluster_names.COMPONENT_LABEL: cluster_names.KEEPER}
    pods = jobs.pods(job.name, labels)
    running = [
        pod
        for pod in pods
        if pod.get("status", {}).get("phase") == "Running"
        and "deletionTimestamp" not in pod["metadata"]
    ]
    if running:
        return max(reversed(running), key=lambda pod: _run_of(pod) == run)
    if not pods:
        why = "has no keeper's pod here" + (
            "" if job.was_ever_seen else ": no operator has seen it"
        )
    else:
        phase = pods[-1].get("status", {}).get("phase")
        why = f"has a keeper's pod {pods[-1]['metadata']['name']}, but it is {phase}"
    hint = (
        "A job whose ttlSecondsAfterFinished is over, or that is suspended before it ever ran, "
        "has none"
    )
    raise UnavailableError(f"{job.name} {why}. {hint}; `dlion get {job.name}` shows its state")


def _run_of(pod: Document) -> str:
    return str((pod["metadata"].get("labels") or {}).get(cluster_names.RUN_LABEL, ""))


def _taken(chunks: Iterable[bytes], out: Path, prefix: str) -> list[Path]:
    console = Console(stderr=True)
    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(done: int, whole: int) -> None:
            progress.update(task, completed=done, total=whole or None)

        return unpack(chunks, out, rename=lambda n: n.removeprefix(prefix), on_progress=show)


def _require_tensorflow(form: str) -> None:
    """Raises: UnavailableError before anything is fetched."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UnavailableError(
            f"--format {form} needs TensorFlow here. Install it: pip install 'dlion[worker]'; or "
            "fetch the model as it is, with --format keras"
        )


def _converted(made: list[Path], form: str) -> list[Path]:
    models = [path for path in made if path.name == "model.keras"]
    if form == "keras" or not models:
        return made
    from dlion_worker.training import converting

    which: Any = form
    return [*made, *(converting.convert(path, which) for path in models)]

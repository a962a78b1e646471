"""`dlion fetch`: download a job's model, or all results, from the site's keeper."""

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, SiteName
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.cluster_options import cluster_options, name_argument
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.inputs.model_provenance import ExpectedOrigin, VerifiedModel, verify_received
from dlion_cli.inputs.unpacking import unpack
from dlion_cli.pod_streams.keeper_files import find_keeper, packed_files, site_of
from dlion_cli.pod_streams.site_trust import bundle_in_cluster, bundle_of_file
from dlion_cli.terminal.failures import install_advice
from dlion_cli.views.job_status import JobStatus


@click.command()
@name_argument()
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Target folder. Default: the job's name.",
)  # fmt: skip
@click.option("--site", metavar="NAME", help="Site of the model. Default: this cluster's site.")
@click.option(
    "--format", "form", type=click.Choice(["keras", "savedmodel", "tflite"]), default="keras",
    help="TensorFlow converts to savedmodel and tflite on this machine.",
)  # fmt: skip
@click.option(
    "--all", "everything", is_flag=True, help="Download the whole result folder (docs/results.md)."
)
@click.option(
    "--run", "run_id", metavar="RUN", help="ID of an earlier run. Default: the job's runId."
)
@click.option(
    "--trust", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
    help="The authority's certificates (PEM), instead of those in the cluster.",
)  # fmt: skip
@click.option("--allow-unsigned", is_flag=True, help="Accept a model without a signature.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@cluster_options
def fetch(
    jobs: JobClient,
    name: str,
    out: Path | None,
    site: str | None,
    form: str,
    everything: bool,
    run_id: str | None,
    trust: Path | None,
    allow_unsigned: bool,
    output: str,
) -> None:
    """Download the model of job NAME: DIR/model.keras, model.json, and model.provenance.json, the
    signed statement of whose updates it holds.

    The exit code is 66, and nothing is replaced, if the model is not the one that its site's keeper
    signed, or is not signed.

    \b
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
    own_site = SiteName(site_of(keeper))
    of_site = SiteName(site) if site else own_site
    folder = f"models/{of_site}"
    expected = ExpectedOrigin(
        JobKey(job.namespace, job.name, run),
        job.uid,
        _authority(jobs, job, run, own_site, trust),
        _revoked(job),
        allows_unsigned=allow_unsigned,
    )
    verified: list[VerifiedModel] = []

    def check(staging: Path) -> None:
        wanted = None if everything else of_site
        verified.extend(verify_received(staging, expected, site=wanted))

    chunks = packed_files(jobs, keeper, run, "." if everything else folder)
    with contextlib.closing(chunks):
        made = _receive(chunks, out or Path(name), "" if everything else f"{folder}/", check)
    _show(_converted(made, form), verified, output)


def _authority(
    jobs: JobClient, job: JobStatus, run: str, own_site: SiteName, trust: Path | None
) -> Callable[[SiteName], bytes]:
    def authority_pem(site: SiteName) -> bytes:
        if trust is not None:
            return bundle_of_file(trust)
        return bundle_in_cluster(jobs, job, run, site, own_site=own_site)

    return authority_pem


def _revoked(job: JobStatus) -> set[str]:
    entries = mappings_in(mapping_of(job.document.get("status")).get("revoked"))
    return {str(each.get("name")) for each in entries if each.get("effective") is not False}


def _show(made: list[Path], verified: list[VerifiedModel], output: str) -> None:
    if output == "json":
        models = [each.to_document() for each in verified]
        files = [str(path) for path in made]
        click.echo(json.dumps({"files": files, "models": models}, indent=2))
        return
    for path in made:
        click.echo(os.fsencode(path))  # a name may be no text
    for each in verified:
        for line in each.lines():
            click.echo(line, err=True)


def _receive(
    chunks: Iterable[bytes], out: Path, prefix: str, check: Callable[[Path], None]
) -> list[Path]:
    console = Console(stderr=True)
    columns = (TextColumn("fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(done: int, whole: int) -> None:
            progress.update(task, completed=done, total=whole or None)

        return unpack(
            chunks,
            out,
            rename=lambda name: name.removeprefix(prefix),
            on_progress=show,
            check=check,
        )


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

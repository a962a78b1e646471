"""Finds the keeper of a job at this site, and has it send files of a run as a tar stream."""

from collections.abc import Generator
from typing import Final

from dlion_api import cluster_names
from dlion_api.errors import UnavailableError
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.views.job_status import JobStatus

_PACK: Final = "dlion_worker.artifact_server.pack"


def find_keeper(jobs: JobClient, job: JobStatus, run: str) -> Document:
    """A running keeper pod, preferably of that run: every keeper has the results of all runs.

    Raises: UnavailableError if there is none.
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
        why = "has no keeper pod here" + (
            "" if job.was_ever_observed else ": no operator has observed it"
        )
    else:
        phase = pods[-1].get("status", {}).get("phase")
        why = f"has a keeper pod {pods[-1]['metadata']['name']}, but it is {phase}"
    hint = "A job has none after its ttlSecondsAfterFinished, or if it was suspended before it ran"
    raise UnavailableError(f"{job.name} {why}. {hint}; `dlion get {job.name}` shows its state")


def _run_of(pod: Document) -> str:
    return str((pod["metadata"].get("labels") or {}).get(cluster_names.RUN_LABEL, ""))


def site_of(keeper: Document) -> str:
    """The name of the keeper's site; empty if its pod does not have it."""
    return str(keeper["metadata"]["labels"].get(cluster_names.SITE_LABEL, ""))


def packed_files(
    jobs: JobClient, keeper: Document, run: str, path: str
) -> Generator[bytes, None, None]:
    """The stream for `dlion_cli.inputs.unpacking` of that file or folder; `.` for everything.

    The caller closes the generator. Raises: as `ClusterClient.exec_command`.
    """
    command = ["python", "-m", _PACK, "--run", run, path]
    container = cluster_names.KEEPER_CONTAINER
    return jobs.cluster.exec_command(str(keeper["metadata"]["name"]), container, command)

"""Finds the keeper of a job at this site, and has it send files of a run as a tar stream."""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dlion_api import cluster_names
from dlion_api.errors import DataError, UnavailableError
from dlion_api.names import JobKey
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.inputs.unpacking import unpack
from dlion_cli.views.job_status import JobStatus

_PACK: Final = "dlion_worker.artifact_server.pack"
_ENVELOPE_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the stream for names, sizes and checksums."""


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
    hint = (
        "A job has none after its ttlSecondsAfterFinished, or if it was suspended before it ran. "
        f"If the claim {cluster_names.keeper_claim_name(JobKey(job.namespace, job.name, ''))} is "
        "still there, a pod that mounts it can be read instead: see docs/keeper.md, Reading the "
        "claim"
    )
    raise UnavailableError(f"{job.name} {why}. {hint}")


def _run_of(pod: Document) -> str:
    return str((pod["metadata"].get("labels") or {}).get(cluster_names.RUN_LABEL, ""))


def is_lost_with_pod(pod: Mapping[str, Any]) -> bool:
    """Whether this is a keeper's pod whose records are on no claim."""
    labels = mapping_of(mapping_of(pod.get("metadata")).get("labels"))
    if labels.get(cluster_names.COMPONENT_LABEL) != cluster_names.KEEPER:
        return False
    volumes = mappings_in(mapping_of(pod.get("spec")).get("volumes"))
    return any(each.get("name") == "state" and "emptyDir" in each for each in volumes)


def site_of(keeper: Document) -> str:
    """The name of the keeper's site; empty if its pod does not have it."""
    return str(keeper["metadata"]["labels"].get(cluster_names.SITE_LABEL, ""))


def packed_files(
    jobs: JobClient, keeper: Document, run: str, *paths: str, events_only: bool = False
) -> Generator[bytes, None, None]:
    """The stream for `dlion_cli.inputs.unpacking` of these files or folders; `.` for everything.

    `events_only`: without the records of steps and links. The caller closes the generator. Raises:
    as `ClusterClient.exec_command`.
    """
    flags = ["--events-only"] if events_only else []
    command = ["python", "-m", _PACK, "--run", run, *flags, *paths]
    container = cluster_names.KEEPER_CONTAINER
    return jobs.cluster.exec_command(str(keeper["metadata"]["name"]), container, command)


def unpack_kept(
    jobs: JobClient,
    job: JobStatus,
    run: str,
    folder: Path,
    paths: Sequence[str],
    *,
    max_bytes: int,
    events_only: bool = False,
) -> None:
    """Unpack these of the run's files into the folder.

    Raises: UnavailableError without a keeper; DataError if it has none of a path, or more than
    `max_bytes` of all; and as `packed_files` and `unpack`.
    """
    keeper = find_keeper(jobs, job, run)
    stream = packed_files(jobs, keeper, run, *paths, events_only=events_only)
    with contextlib.closing(stream) as chunks:
        unpack(_bounded(chunks, max_bytes + _ENVELOPE_BYTES), folder)


def _bounded(chunks: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    for chunk in chunks:
        max_bytes -= len(chunk)
        if max_bytes < 0:
            raise DataError("the keeper sends more than these files may have")
        yield chunk

"""Events and figures of a run that a site's keeper has, for `dlion events` and `dlion describe`.

The API server drops its events after an hour; the keeper has the run's as long as its disk lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlion_api.errors import ContractError, DataError, UnavailableError
from dlion_api.names import KIND
from dlion_api.protocol.progress import EventRecord, ProgressRecord
from dlion_cli.cluster.cluster_jobs import Document, JobClient
from dlion_cli.pod_streams.keeper_files import unpack_kept
from dlion_cli.views.job_status import JobStatus
from dlion_local.temporary_folder import temporary_folder
from dlion_results.run_folder.description import worker_name
from dlion_results.run_folder.events import read_events
from dlion_results.run_folder.layout import EVENTS, JOB, SUMMARY
from dlion_results.run_folder.manifest import read_job
from dlion_results.run_folder.regular_files import read_start
from dlion_results.run_folder.stored_values import MAX_BYTES, UNREADABLE, parse_mapping

if TYPE_CHECKING:
    from dlion_api.spec import Job

MAX_RECORDS_BYTES: Final = 8 << 30
"""Maximum size of a run's records: a keeper that sends without end must not fill the disk."""
RUN_SECONDS: Final = "runSeconds"
"""Field of an event: its time from the start of the run."""


def kept_events(jobs: JobClient, job: JobStatus, run: str) -> list[Document]:
    """The newest events of the run, oldest first, in the form of the API server's.

    Raises: UnavailableError if the keeper has none, or cannot be read; DeniedError.
    """
    with kept_records(jobs, job, run, events_only=True) as (manifest, records):
        about = {"kind": KIND, "namespace": job.namespace, "name": job.name}
        return [
            event_document(each, about, manifest)
            for each in records
            if isinstance(each, EventRecord)
        ]


@contextmanager
def kept_records(
    jobs: JobClient, job: JobStatus, run: str, *, events_only: bool = False
) -> Iterator[tuple[Job | None, Iterator[ProgressRecord]]]:
    """The run's manifest, None if it cannot be read, and its records, oldest first.

    Raises: UnavailableError if the keeper has none, or cannot be read; DeniedError.
    """
    with temporary_folder() as folder:
        most = MAX_BYTES if events_only else MAX_RECORDS_BYTES
        _unpack(jobs, job, run, folder, JOB, EVENTS, max_bytes=most, events_only=events_only)
        try:
            manifest = read_job(folder)
        except DataError:
            manifest = None
        yield manifest, read_events(folder / EVENTS)


def kept_summary(jobs: JobClient, job: JobStatus) -> dict[str, Any]:
    """The figures of the job's run, which has ended.

    Raises: UnavailableError if the keeper has none, or cannot be read; DeniedError.
    """
    with temporary_folder() as folder:
        _unpack(jobs, job, job.run_id, folder, SUMMARY, max_bytes=MAX_BYTES)
        try:
            return parse_mapping(read_start(folder / SUMMARY, MAX_BYTES + 1))
        except UNREADABLE as error:
            raise UnavailableError(f"the keeper's {SUMMARY} is damaged: {error}") from error


def _unpack(
    jobs: JobClient,
    job: JobStatus,
    run: str,
    folder: Path,
    *paths: str,
    max_bytes: int,
    events_only: bool = True,
) -> None:
    try:
        unpack_kept(jobs, job, run, folder, paths, max_bytes=max_bytes, events_only=events_only)
    except (DataError, ContractError) as error:  # of the command in the pod
        message = f"the keeper's records of run {run} cannot be read: {error}"
        raise UnavailableError(message) from error


def event_document(record: EventRecord, about: Mapping[str, Any], manifest: Job | None) -> Document:
    """The event in the form of the API server's; `about`: the job that it is of, or its worker."""
    if record.is_of_worker:
        rank = record.rank
        name = f"worker {rank}" if manifest is None else worker_name(manifest, rank)
        about = {"kind": "Worker", "name": name}
    return {
        "type": "Warning" if record.warning else "Normal",
        "reason": record.reason,
        "message": record.message,
        "involvedObject": about,
        RUN_SECONDS: record.time_s,
    }

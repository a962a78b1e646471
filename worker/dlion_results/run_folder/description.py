"""Names a job's workers, as results do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.names import Rank, WorkerIdentity

if TYPE_CHECKING:
    from dlion_api.spec import Job


def find_worker(job: Job, rank: Rank) -> WorkerIdentity | None:
    """The worker of that rank; None if the job has no such rank."""
    try:
        return job.worker(rank)
    except LookupError:
        return None


def worker_name(job: Job, rank: Rank) -> str:
    """Short name of that worker, or its rank if the job has no such worker."""
    worker = find_worker(job, rank)
    return f"worker {rank}" if worker is None else worker.name

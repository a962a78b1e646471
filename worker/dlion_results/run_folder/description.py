"""What results need of a job: reads it from a result folder, and names its workers."""

from pathlib import Path

import yaml

from dlion_api.errors import DataError, DLionError
from dlion_api.names import Rank, WorkerIdentity
from dlion_api.spec import Job, load_job


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


def read_job(folder: Path) -> Job:
    """The job of a result folder. Raises DataError if it has no readable `job.yaml`."""
    path = folder / "job.yaml"
    try:
        return load_job(yaml.safe_load(path.read_text("utf-8")), source=str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, DLionError) as error:
        raise DataError(
            f"{path}: is not a readable job ({error}). Name a folder that `dlion run` made"
        ) from error

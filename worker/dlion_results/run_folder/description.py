"""The properties of a job that results need: workers, goal, settings.

Derived from a loaded job, or from `job.yaml` in a result folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from dlion_api.errors import DataError, DLionError
from dlion_api.names import JobKey, Rank, WorkerIdentity

if TYPE_CHECKING:
    from pathlib import Path

    from dlion_api.spec import Job


@dataclass(frozen=True)
class RunDescription:
    """The job of a run; `document` is the manifest with its defaults."""

    job: Job
    key: JobKey
    workers: tuple[WorkerIdentity, ...]
    document: Mapping[str, Any]
    spec_hash: str = ""
    target_accuracy: float | None = None
    max_steps: int | None = None
    max_seconds: int | None = None
    max_epochs: int | None = None

    def worker(self, rank: Rank) -> WorkerIdentity | None:
        """The worker of that rank; None if the job has no such rank."""
        try:
            return self.job.worker(rank)
        except LookupError:
            return None

    def worker_name(self, rank: Rank) -> str:
        """Short name of that worker, or its rank if the job has no such worker."""
        worker = self.worker(rank)
        return f"worker {rank}" if worker is None else worker.name


def describe(job: Job) -> RunDescription:
    """Describe a loaded and validated job."""
    stop = job.spec.trainer.stop
    return RunDescription(
        job=job,
        key=job.key,
        workers=job.workers(),
        document=job.to_document(),
        spec_hash=job.hash(),
        target_accuracy=stop.target_accuracy,
        max_steps=stop.max_steps,
        max_seconds=stop.max_seconds,
        max_epochs=stop.max_epochs,
    )


def describe_folder(folder: Path) -> RunDescription:
    """Describe the job of a result folder.

    Raises DataError if the folder has no readable `job.yaml`.
    """
    from dlion_api.spec import load_job

    path = folder / "job.yaml"
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
        return describe(load_job(document, source=str(path)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, DLionError) as error:
        raise DataError(
            f"{path}: is not a readable job ({error}). Name a folder that `dlion run` made"
        ) from error

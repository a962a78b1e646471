"""What results need to know of a job: its workers, its goal, its settings.

Owns the step from a manifest to that. Called by `folder` and `summary` with a job that was loaded,
and by `report` with the `job.yaml` of a folder. The manifest's own rules are `dlion_api.spec`'s.
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
    """A job as results see it; `document` is the manifest with its defaults filled in."""

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
        """The worker of that rank; None: the job cannot have it."""
        try:
            return self.job.worker(rank)
        except LookupError:
            return None

    def worker_name(self, rank: Rank) -> str:
        """Short name of that worker; of a rank that the job cannot have, its number."""
        worker = self.worker(rank)
        return f"worker {rank}" if worker is None else worker.name


def describe(job: Job) -> RunDescription:
    """The description of a job that was loaded and checked."""
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
    """The description kept in a result folder.

    Raises: DataError when the folder holds no readable `job.yaml`.
    """
    from dlion_api.spec import load_job

    path = folder / "job.yaml"
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
        return describe(load_job(document, source=str(path)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, DLionError) as error:
        raise DataError(
            f"{path}: is no job that can be read ({error}). Name a folder that `dlion run` made"
        ) from error

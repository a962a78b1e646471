"""Checks that the files of a job exist, before starting runs that would fail seconds later.

Does not read the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from dlion_api.errors import DataError
from dlion_api.spec import Job
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_cli.run import find_program_root, require_program


def require_files(jobs: Mapping[str, Job], file: Path, data_root: Path) -> None:
    """Check the files of the jobs of manifest `file`; `jobs` is keyed by column.

    Raises: ProgramError if a program is missing; DataError with all missing data files.
    """
    for job in jobs.values():
        require_program(job, find_program_root(job, file, None))
    missing = dict.fromkeys(
        (what, path)
        for job in jobs.values()
        for what, path in _job_paths(job, data_root.resolve())
        if not path.exists()
    )
    if missing:
        lines = "; ".join(f"{what}: no such file or directory: {path}" for what, path in missing)
        raise DataError(
            f"{lines}. Paths are relative to the site's data root, which --data-root names"
        )


def _job_paths(job: Job, data_root: Path) -> Iterable[tuple[str, Path]]:
    """Each path that the job's workers read, with its field in the manifest."""
    trainer = job.spec.trainer
    if trainer.start_from:
        yield "trainer.startFrom", data_root / trainer.start_from
    for worker in job.workers():
        own = (str(worker.site), worker.group, str(worker.index), str(worker.rank))
        for field, path in (
            ("path", trainer.dataset.path),
            ("evaluationPath", trainer.dataset.evaluation_path),
        ):
            if path is not None:
                for name, value in zip(PATH_PLACEHOLDERS, own, strict=True):
                    path = path.replace(name, value)
                yield f"trainer.dataset.{field}", data_root / path

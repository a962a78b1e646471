"""Files that a job names and that are not there, found without loading any.

Called before runs are started that would each find out by themselves, seconds later. Says nothing
of what is in the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from dlion_api.errors import DataError
from dlion_api.spec import Job
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_cli.run import program_root_of, refuse_without_program


def refuse_without_files(jobs: Mapping[str, Job], file: Path, data_root: Path) -> None:
    """`jobs`: by the name of what they belong to; `file`: their manifest.

    Raises: ProgramError where a program is not there; DataError naming all data that are not.
    """
    for job in jobs.values():
        refuse_without_program(job, program_root_of(job, file, None))
    missing = dict.fromkeys(
        (what, path)
        for job in jobs.values()
        for what, path in _named(job, data_root.resolve())
        if not path.exists()
    )
    if missing:
        lines = "; ".join(f"{what}: no such file or directory: {path}" for what, path in missing)
        raise DataError(
            f"{lines}. Paths are relative to the site's data root, which --data-root names"
        )


def _named(job: Job, data_root: Path) -> Iterable[tuple[str, Path]]:
    """All that the workers of a job read, and by which field of the manifest."""
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

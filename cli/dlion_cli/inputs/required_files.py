"""Checks that the files of a job exist, before starting runs that would fail seconds later."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from dlion_api.errors import DataError, ProgramError
from dlion_api.spec import Job
from dlion_api.spec.dataset import PATH_PLACEHOLDERS
from dlion_cli.inputs.manifests import STDIN
from dlion_cli.inputs.program_files import file_problems
from dlion_results.run_folder.storage import stored_program_root
from dlion_worker.initializers.folders import dataset_root, model_root
from dlion_worker.program_modules import parse_file


def require_files(jobs: Mapping[str, Job], file: Path, data_root: Path) -> None:
    """Check the files of the jobs of manifest `file`; `jobs` is keyed by column.

    Raises: ProgramError if a program is missing; DataError with all missing data files.
    """
    for job in jobs.values():
        require_program(job, find_program_root(job, file, None))
    require_data(jobs.values(), data_root)


def require_data(jobs: Iterable[Job], data_root: Path) -> None:
    """Raises: DataError with all missing files and folders."""
    root = data_root.resolve()
    missing = dict.fromkeys(
        (what, start, path)
        for job in jobs
        for what, start, path in _job_paths(job, root)
        if not path.exists()
    )
    if missing:
        lines = "; ".join(f"{what}: no such file or directory: {path}" for what, _, path in missing)
        starts = {start for _, start, _ in missing}
        advice = []
        if root in starts:
            advice.append("Paths are relative to the site's data root, which --data-root names")
        if starts - {root}:
            advice.append(
                "Paths in a download are relative to it (trainer.initializer): `dlion run` and"
                " `dlion simulate` get it; if it is there, correct the path"
            )
        raise DataError(f"{lines}. {'. '.join(advice)}")


def find_program_root(job: Job, file: Path, resume: Path | None) -> Path:
    """The folder in which `trainer.program` is looked up: the manifest's folder.

    A run's own copy of the manifest leads to the folder of the original. With `resume`, so does a
    manifest from standard input, or one without its program beside it. Without `resume`, standard
    input means the working directory.
    """
    folder = file.parent if str(file) != STDIN else resume or Path()
    root = stored_program_root(folder) or folder.resolve()
    program = job.spec.trainer.program.file
    if resume is not None and program and not (root / program).is_file():
        return stored_program_root(resume) or root
    return root


def require_program(job: Job, root: Path) -> None:
    """Raises: ProgramError for what each worker would fail with later.

    That is a missing file, a file of the program that is not Python or cannot be imported, or a
    program without model or data.
    """
    program = job.spec.trainer.program.file
    if program and (root / program).is_file():
        parse_file((root / program).resolve())  # its error shows the line
    if problems := file_problems(job, root):
        raise ProgramError("\n".join(map(str, problems)))


def _job_paths(job: Job, data_root: Path) -> Iterable[tuple[str, Path, Path]]:
    """Each path that the job's workers read, with its field in the manifest and where it starts."""
    trainer = job.spec.trainer
    start = model_root(trainer, data_root)
    if trainer.start_from:
        yield "trainer.startFrom", start, start / trainer.start_from
    if trainer.encoder:
        yield "trainer.encoder", start, start / trainer.encoder
    start = dataset_root(trainer, data_root)
    for worker in job.workers():
        own = (str(worker.site), worker.group, str(worker.index), str(worker.rank))
        for field, path in (
            ("path", trainer.dataset.path),
            ("evaluationPath", trainer.dataset.evaluation_path),
        ):
            if path is not None:
                for name, value in zip(PATH_PLACEHOLDERS, own, strict=True):
                    path = path.replace(name, value)
                yield f"trainer.dataset.{field}", start, start / path

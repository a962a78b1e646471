"""The folder of a comparison: locks it, and protects files that are not the comparison's.

A run's folder contains `COMPARISON_MARKER` before the run starts and `COMPARED` after it ended.
Other folders are not touched. Called by `compare` and `comparison_runner`.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from dlion_api.errors import Problem, SpecError
from dlion_results.run_folder.layout import (
    COMPARED,
    COMPARISON,
    COMPARISON_MARKER,
    EVENTS,
    JOB,
    LOCK,
    REPORT,
    SUMMARY,
)
from dlion_results.run_folder.lock import FolderLock, is_lock
from dlion_results.run_folder.storage import storage_error
from dlion_results.summary.judgement import EndReason

PICTURE: Final = "comparison.svg"
DIVERGED: Final = "diverged.txt"
"""Error output of a diverged run, in its folder. The run is not repeated."""

_USE_ANOTHER_FOLDER: Final = "Choose another folder with --out, or move this"


def aggregate_environment_file(out: Path, environment: str) -> Path:
    """The file for the environment with all machines combined into one."""
    return out / f"{Path(environment).stem}-as-one.yaml"


def reject_foreign_files(out: Path, folders: Iterable[Path], aggregated: Iterable[str]) -> None:
    """Check that no file would be overwritten or removed that is not the comparison's.

    `folders`: of its runs, relative to `out`. `aggregated`: environments that are combined into one
    machine. Raises: SpecError naming all such files.
    """
    if _contains_run(out):
        problem = Problem(
            "--out",
            "is the result folder of a run, not of a comparison",
            value=str(out),
            allowed="a new or empty folder, or that of a comparison",
            advice="Choose another folder",
        )
        raise SpecError([problem])
    folders = list(folders)
    above = dict.fromkeys(
        out / part
        for folder in folders
        for part in reversed(folder.parents)
        if part != Path()  # `out` itself
    )
    foreign_paths = [path for path in above if path.exists() and not path.is_dir()]
    foreign_paths += [path for path in above if path.is_dir() and _contains_run(path)]
    foreign_paths += [out / folder for folder in folders if not _is_replaceable(out / folder)]
    locks = (folder / LOCK for folder in (out, *(out / folder for folder in folders)))
    foreign_paths += [path for path in locks if not is_lock(path)]
    if not _is_comparison(out / COMPARISON):
        # The picture and the report are written after the figures.
        figures = (out / COMPARISON, out / PICTURE, out / REPORT)
        foreign_paths += [path for path in figures if path.exists()]
    ones = dict.fromkeys(aggregate_environment_file(out, environment) for environment in aggregated)
    foreign_paths += [path for path in ones if not _is_aggregate_environment(path)]
    problems = [
        Problem(
            str(path),
            "was not made by a comparison, and is not replaced",
            advice=_USE_ANOTHER_FOLDER,
        )
        for path in dict.fromkeys(foreign_paths)
    ]
    if problems:
        raise SpecError(problems, source=f"--out {out}")


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Create the folder and lock it for one comparison.

    Raises: UnavailableError while another comparison or a run uses it; SpecError if `run.lock` is
    not a lock file; StorageError.
    """
    _create("the comparison's folder", out)
    lock = FolderLock(out)
    try:
        yield
    finally:
        lock.release()


def is_done(folder: Path, request: str) -> bool:
    """Whether a run with these settings has ended there: successful, partial or diverged."""
    try:
        if (folder / COMPARED).read_text() != request:
            return False
        if (folder / COMPARISON_MARKER).exists():  # another run has begun to replace it
            return False
        summary = json.loads((folder / SUMMARY).read_text())
        ending = summary["ending"]
        has_figures = ending["succeeded"] is True or ending.get("reason") == EndReason.PARTIAL
        return has_figures or (folder / DIVERGED).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def begin_run(folder: Path, request: str) -> None:
    """Create the folder of a new run, replacing an earlier one of the comparison.

    At each moment, the folder is identifiable as the comparison's, or is empty. Raises: SpecError
    if it is not the comparison's; UnavailableError while a run uses it; StorageError.
    """
    if not _is_replaceable(folder):
        problem = Problem(str(folder), "was not made by a comparison", advice=_USE_ANOTHER_FOLDER)
        raise SpecError([problem], source="--out")
    _create("the run's folder", folder)
    lock = FolderLock(folder)
    try:
        (folder / COMPARISON_MARKER).write_text(request)
        for entry in folder.iterdir():
            if entry.name not in {LOCK, COMPARISON_MARKER}:
                _remove(entry)
    except OSError as error:
        raise storage_error("cannot remove an earlier run from", folder, error) from error
    finally:
        lock.release()


def _create(what: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(f"cannot create {what}", folder, error) from error


def end_run(folder: Path) -> None:
    """Mark the run as ended."""
    (folder / COMPARISON_MARKER).replace(folder / COMPARED)


def _contains_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (JOB, EVENTS, SUMMARY))


def _is_replaceable(folder: Path) -> bool:
    """Whether it is a run of a comparison, empty, or missing."""
    if not folder.is_dir():
        return not folder.exists()
    names = {entry.name for entry in folder.iterdir()}
    return bool(names & {COMPARISON_MARKER, COMPARED}) or (
        names <= {LOCK} and is_lock(folder / LOCK)
    )


def _is_comparison(path: Path) -> bool:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"rows", "targetAccuracy"} <= document.keys()


def _is_aggregate_environment(path: Path) -> bool:
    """True also if the file is missing."""
    try:
        document = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return True
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(document, dict) and str(document.get("name")).endswith("-as-one")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()

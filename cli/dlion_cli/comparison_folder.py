"""The folder of a comparison: one comparison at a time in it, and nothing of others taken away.

Owns which files there are a comparison's own. A run's folder is known by `BEGUN`, in it before the
run starts, and by `ASKED` once the run has ended; what has neither is somebody else's. Called by
`compare` and `comparing`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from dlion_api.errors import Problem, SpecError
from dlion_worker.results.folder import EVENTS, JOB, SUMMARY
from dlion_worker.results.judgement import EndReason
from dlion_worker.results.lock import BEGUN, LOCK, FolderLock, is_lock
from dlion_worker.results.storage import storage_error

COMPARISON: Final = "comparison.json"
PICTURE: Final = "comparison.svg"
ASKED: Final = "compared.json"
"""In the folder of a run that has ended: what it was asked for."""
DIVERGED: Final = "diverged.txt"
"""In the folder of a run that diverged: what it said. It is not run again."""

_ELSEWHERE: Final = "Choose another folder with --out, or move this away"


def as_one_file(out: Path, environment: str) -> Path:
    """Where the environment of the one machine that has it all is kept."""
    return out / f"{Path(environment).stem}-as-one.yaml"


def refuse_foreign(out: Path, folders: Iterable[Path], as_one: Iterable[str]) -> None:
    """Nothing that a comparison is to write over, or take away, is anybody else's.

    `folders`: of its runs, within `out`; `as_one`: environments that get an `as_one_file`.
    Raises: SpecError naming all that is not its own.
    """
    if _holds_a_run(out):
        problem = Problem(
            "--out",
            "is the result folder of a run, and no comparison goes into it",
            value=str(out),
            allowed="a new or an empty folder, or that of a comparison",
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
    foreign = [path for path in above if path.exists() and not path.is_dir()]
    foreign += [path for path in above if path.is_dir() and _holds_a_run(path)]
    foreign += [out / folder for folder in folders if not _may_be_replaced(out / folder)]
    locks = (folder / LOCK for folder in (out, *(out / folder for folder in folders)))
    foreign += [path for path in locks if not is_lock(path)]
    if not _is_comparison(out / COMPARISON):
        figures = (out / COMPARISON, out / PICTURE)  # the picture is written after the figures
        foreign += [path for path in figures if path.exists()]
    ones = dict.fromkeys(as_one_file(out, environment) for environment in as_one)
    foreign += [path for path in ones if not _is_as_one(path)]
    problems = [
        Problem(str(path), "was not made by a comparison, and is not replaced", advice=_ELSEWHERE)
        for path in dict.fromkeys(foreign)
    ]
    if problems:
        raise SpecError(problems, source=f"--out {out}")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Inside, this comparison is the only one in that folder, which is made.

    Raises: UnavailableError while another one, or a run, goes on in it; SpecError where its
    `run.lock` is somebody else's; StorageError.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("cannot make the comparison's folder", out, error) from error
    lock = FolderLock(out)
    try:
        yield
    finally:
        lock.release()


def is_done(folder: Path, asked: str) -> bool:
    """Whether a run that was asked for just that has ended there: well, partial or diverged."""
    try:
        if (folder / ASKED).read_text() != asked:
            return False
        summary = json.loads((folder / SUMMARY).read_text())
        ending = summary["ending"]
        has_figures = ending["succeeded"] is True or ending.get("reason") == EndReason.PARTIAL
        return has_figures or (folder / DIVERGED).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def begin(folder: Path, asked: str) -> None:
    """Makes the folder of a run that is about to start, in place of a comparison's earlier one.

    At every moment either it can be told from others' or nothing else is in it. Raises: SpecError
    where it is somebody else's; UnavailableError while a run goes on in it; StorageError.
    """
    if not _may_be_replaced(folder):
        problem = Problem(str(folder), "was not made by a comparison", advice=_ELSEWHERE)
        raise SpecError([problem], source="--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error("cannot make the run's folder", folder, error) from error
    lock = FolderLock(folder)
    try:
        (folder / BEGUN).write_text(asked)
        for entry in folder.iterdir():
            if entry.name not in {LOCK, BEGUN}:
                _remove(entry)
    except OSError as error:
        raise storage_error("cannot make room for a run in", folder, error) from error
    finally:
        lock.release()


def end(folder: Path) -> None:
    """The run there has ended, and counts as long as it is asked for in just that way."""
    (folder / BEGUN).replace(folder / ASKED)


def _holds_a_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (JOB, EVENTS, SUMMARY))


def _may_be_replaced(folder: Path) -> bool:
    """Whether it is a comparison's run, has ended or not, or nothing at all."""
    if not folder.is_dir():
        return not folder.exists()
    names = {entry.name for entry in folder.iterdir()}
    return bool(names & {BEGUN, ASKED}) or (names <= {LOCK} and is_lock(folder / LOCK))


def _is_comparison(path: Path) -> bool:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"rows", "targetAccuracy"} <= document.keys()


def _is_as_one(path: Path) -> bool:
    """Or there is none."""
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

"""Result folders that commands for jobs of a cluster take instead of a job, and their JSON."""

from __future__ import annotations

import difflib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from dlion_api.errors import DataError
from dlion_results.run_folder.layout import has_results

if TYPE_CHECKING:
    from dlion_results.run_folder.listing import StoredRun

RUNS: Final = "runs"
"""The folder in which `dlion run` creates result folders."""


def local_folder(name: str, *, is_of_cluster: bool) -> Path | None:
    """The result folder that NAME is; None: it is a job of a cluster.

    `is_of_cluster`: whether an option selects a cluster.

    `dlion ls` lists folders without their path, so a hint shows how to name one.
    """
    if is_of_cluster:
        return None
    if "/" in name or has_run(Path(name)):
        return Path(name)
    if has_run(Path(RUNS, name)):
        click.echo(f"dlion: for the result folder write {shlex.quote(f'{RUNS}/{name}')}", err=True)
    return None


def has_run(path: Path) -> bool:
    """Whether it has a run. The folder of a manifest and its program has none."""
    try:
        return has_results({each.name for each in path.iterdir()})
    except (OSError, ValueError):  # no name of a file
        return False


def is_readable_folder(path: Path) -> bool:
    """Whether there is such a folder. Raises: DataError if it may not be read."""
    try:
        os.scandir(path).close()
    except PermissionError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}. Check the rights of it and of the folders "
            "above it"
        ) from error
    except (OSError, ValueError):
        return False
    return True


def require_folder(path: Path) -> None:
    """Raises: DataError if there is no such folder, with the name of a similar one beside it, or
    if it may not be read."""
    if is_readable_folder(path):
        return
    below = Path(RUNS, path)  # as `dlion ls` names it
    if has_run(below):
        near = [below]
    else:
        try:
            beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
        except (OSError, ValueError):
            beside = []
        near = [path.parent / each for each in difflib.get_close_matches(path.name, beside, n=1)]
    hint = f'Did you mean "{near[0]}"? ' if near else ""
    raise DataError(
        f"{path}: there is no such folder. {hint}`dlion ls` lists result folders; a job of a "
        "cluster is named without a slash"
    )


def run_document(run: StoredRun, name: str) -> dict[str, Any]:
    """The run for `-o json`; None: not known."""
    return {
        "name": name,
        "path": str(run.path),
        "command": run.command or None,
        "state": str(run.state),
        "reason": run.reason or None,
        "detail": run.detail or None,
        "resumable": run.is_resumable,
        "job": run.job or None,
        "accuracy": run.accuracy,
        "iterations": run.iteration,
        "durationSeconds": run.duration_s,
        "startedAt": run.started_at.isoformat(timespec="seconds") if run.started_at else None,
        "sizeBytes": run.size_bytes,
    }

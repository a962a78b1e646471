"""Reads the manifest of a result folder, whose content may be damaged or hostile.

Apart from `description`: the image of a worker, whose keeper opens result folders, has no
`dlion_environments`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import DataError, DLionError
from dlion_environments.yaml_text import MAX_BYTES, parse_documents, single_document
from dlion_results.run_folder.layout import JOB
from dlion_results.run_folder.regular_files import read_start

if TYPE_CHECKING:
    from dlion_api.spec import Job


def parse_job(content: bytes, *, source: str) -> Job:
    """The job of a manifest. Raises: SpecError, also for more than 1 MiB or 100,000 values."""
    from dlion_api.spec import load_job  # commands that may get a folder mostly do not

    document = single_document(parse_documents(content, source=source), source=source)
    return load_job(document.value, source=source, lines=document.lines)


def read_manifest_bytes(folder: Path, *, follow_links: bool = False) -> bytes:
    """The content of `job.yaml`, a byte longer than a job may be if it is longer.

    Raises: OSError, also if it is not a regular file.
    """
    return read_start(folder / JOB, MAX_BYTES + 1, follow_links=follow_links)


def read_job(folder: Path) -> Job:
    """The job of a result folder. Raises DataError if it has no readable `job.yaml`."""
    return read_job_and_text(folder)[0]


def read_job_and_text(folder: Path) -> tuple[Job, str]:
    """The job of a result folder, and its `job.yaml`. Raises: as `read_job`."""
    path = folder / JOB
    try:
        content = read_manifest_bytes(folder, follow_links=True)
        return parse_job(content, source=str(path)), content.decode("utf-8", "replace")
    except (OSError, DLionError) as error:
        raise DataError(
            f"{path}: is not a readable job ({error}). Name a folder that `dlion run` made"
        ) from error

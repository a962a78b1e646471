"""Where downloads lie, and at which folder a job's relative paths start."""

import os
from pathlib import Path

from dlion_api.cluster_names import DOWNLOADS_VARIABLE
from dlion_api.spec.initializers import Download
from dlion_api.spec.trainer import Trainer


def downloads_folder() -> Path:
    """The folder of downloads: in a pod the volume of its initializers, else in the user's cache,
    for all jobs."""
    if given := os.environ.get(DOWNLOADS_VARIABLE):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "dlion" / "downloads"


def dataset_root(trainer: Trainer, data_root: Path) -> Path:
    """Return where `dataset.path` and `dataset.evaluationPath` start."""
    return _root(trainer.initializer.dataset, data_root)


def model_root(trainer: Trainer, data_root: Path) -> Path:
    """Return where `startFrom` and `encoder` start."""
    return _root(trainer.initializer.model, data_root)


def _root(download: Download | None, data_root: Path) -> Path:
    return data_root if download is None else downloads_folder() / download.folder_name

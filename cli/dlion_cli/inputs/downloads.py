"""Gets what a job's manifest names in `trainer.initializer`, before it trains on this machine."""

import os

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from dlion_api.spec import Job
from dlion_api.spec.initializers import Download
from dlion_worker.initializers.folders import downloads_folder
from dlion_worker.initializers.store import DownloadStore


def fetch_downloads(job: Job) -> None:
    """Download what is not in the user's cache, with a progress bar on standard error.

    Raises: DataError if a retry does not help; UnavailableError; OSError.
    """
    initializer = job.spec.trainer.initializer
    store = DownloadStore(downloads_folder())
    for download in (initializer.dataset, initializer.model):
        if download is not None and not store.has(download):
            _fetch(store, download)


def _fetch(store: DownloadStore, download: Download) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("downloading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        store.fetch(download, environment=os.environ, on_progress=show)

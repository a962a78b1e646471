"""The process of an init container: gets one download into the pod's volume.

Called by `dlion_worker.pod`. Its last message is the container's termination message, which the
operator shows.
"""

import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from dlion_api import cluster_names as names
from dlion_api.errors import DLionError, Problem, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_worker.coordination.download_reports import DownloadReports
from dlion_worker.initializers.folders import downloads_folder
from dlion_worker.initializers.store import MAX_BYTES, DownloadStore
from dlion_worker.pod.pod_environment import Pod, under_root

REPORT_INTERVAL_S: Final = 10.0
_LOG = logging.getLogger(__name__)


def initialize(pod: Pod, role: str, report: Path) -> None:
    """Get the download of that init container. Raises: DLionError, OSError, after writing the
    message to `report`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ExitCode.INTERRUPTED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        _fetch(pod, role)
    except (DLionError, OSError) as error:
        report.write_text(f"{error}\n", encoding="utf-8")
        raise


def _fetch(pod: Pod, role: str) -> None:
    initializer = pod.job.spec.trainer.initializer
    download = initializer.dataset if role == names.DATASET_INITIALIZER else initializer.model
    if download is None:
        problem = Problem("spec.trainer.initializer", f"has nothing for {role}")
        raise SpecError([problem], source="the run's ConfigMap")
    store = DownloadStore(downloads_folder(), _max_bytes(pod.environment, downloads_folder()))
    if store.has(download):
        _LOG.info("%s: is there", download.file_name)
        return
    reports = _reports(pod, role)
    try:
        place = store.fetch(
            download,
            environment=pod.environment,
            variables=names.DOWNLOAD_CREDENTIALS,
            on_progress=_ProgressLog(download.file_name, reports),
        )
    finally:
        if reports is not None:
            reports.close()
    _LOG.info("%s: verified, in %s", download.file_name, place)


def _max_bytes(environment: Mapping[str, str], folder: Path) -> int:
    """What the volume has left beside earlier downloads."""
    given = environment.get(names.DOWNLOAD_BYTES_VARIABLE, "")
    if not given.isdecimal():
        return MAX_BYTES
    whole = (file for place in folder.glob("[!.]*") for file in place.rglob("*"))
    return max(0, int(given) - sum(file.stat().st_size for file in whole if file.is_file()))


def _reports(pod: Pod, role: str) -> DownloadReports | None:
    """None: the pod lacks what reports need, as with a Job of an operator that had none."""
    try:
        config = pod.worker_config(listen_host="", state_dir=under_root(pod.root, names.SHARED_DIR))
        return DownloadReports(config, pod.job.key, pod.worker(), role)
    except (DLionError, OSError) as error:
        _LOG.warning("progress is not reported: %s", error)
        return None


class _ProgressLog:
    """Logs and, if it can, reports the progress of one download, at an interval."""

    def __init__(self, name: str, reports: DownloadReports | None) -> None:
        self._name, self._reports, self._next_s = name, reports, 0.0

    def __call__(self, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s and done != total:
            return
        self._next_s = now_s + REPORT_INTERVAL_S
        of = f" of {total / 1e6:.1f} MB ({done / max(total, 1):.0%})" if total else " MB"
        _LOG.info("%s: %.1f%s", self._name, done / 1e6, of)
        if self._reports is not None:
            self._reports.send(done, total)

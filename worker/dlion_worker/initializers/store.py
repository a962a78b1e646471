"""Keeps downloads in a folder, each under its SHA-256: whole and verified, or not at all.

Several processes, and the pods of one claim, may share the folder. A download that was interrupted
continues from where it stopped.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dlion_api.errors import DataError
from dlion_api.spec.initializers import Download
from dlion_worker.initializers.archives import Archive
from dlion_worker.initializers.credentials import (
    authorization,
    local_variables,
    s3_credentials,
)
from dlion_worker.initializers.http_file import HttpFile, OnProgress
from dlion_worker.initializers.s3_object import S3Object

MAX_BYTES: Final = 256 * 1024**3
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DownloadStore:
    """The downloads in one folder."""

    folder: Path
    max_bytes: int = MAX_BYTES
    """Maximum size of one download, packed and unpacked together."""

    def has(self, download: Download) -> bool:
        return self._place(download).is_dir()

    def fetch(
        self,
        download: Download,
        *,
        environment: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        on_progress: OnProgress = lambda _done, _total: None,
    ) -> Path:
        """Return the folder of that download, after getting it if it is not there.

        `variables` of `environment` hold the credentials, by the keys of the Secret that the
        download names; None: `local_variables`. Raises: DataError if a retry does not help;
        UnavailableError; OSError.
        """
        place = self._place(download)
        if self.has(download):
            return place
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(download):
            if not self.has(download):  # another process may have got it
                by_key = variables or local_variables(download.secret_name)
                source = _source(download, environment, by_key)
                self._put(download, self._verified(download, source, on_progress))
        return place

    def _place(self, download: Download) -> Path:
        return self.folder / download.folder_name

    @contextmanager
    def _locked(self, download: Download) -> Iterator[None]:
        with (self.folder / f".{download.sha256}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _verified(self, download: Download, source: HttpFile, on_progress: OnProgress) -> Path:
        """Return the complete file, with the right digest."""
        packed = self.folder / f".{download.sha256}.part"
        is_first = True
        while True:
            is_certain = source.save(packed, max_bytes=self.max_bytes, on_progress=on_progress)
            with packed.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest == download.sha256:
                return packed
            size = packed.stat().st_size
            packed.unlink()
            if is_certain or not is_first:
                raise DataError(
                    f"{download.file_name}: another SHA-256 than the manifest's (given: {digest}, "
                    f"of {size} bytes; expected: {download.sha256}). Correct url or sha256"
                )
            is_first = False
            _LOG.warning("%s: not whole, or changed; once more", download.file_name)

    def _put(self, download: Download, packed: Path) -> None:
        """Move the file, or what it holds, to its place, which appears as a whole."""
        for left_behind in self.folder.glob(f".{download.sha256}.*/"):
            shutil.rmtree(left_behind)
        staging = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".{download.sha256}."))
        try:
            if download.is_archive:
                left = self.max_bytes - packed.stat().st_size
                Archive(packed, download.file_name).unpack(staging, max_bytes=left)
            else:
                packed.rename(staging / download.file_name)
            staging.chmod(0o755)
            # Else a power loss may leave empty files in a folder that counts as verified. One call,
            # as those for each of a million files take minutes.
            os.sync()
            packed.unlink(missing_ok=True)  # a process that ends after the rename would leave it
            staging.rename(self._place(download))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def _source(
    download: Download, environment: Mapping[str, str], variables: Mapping[str, str]
) -> HttpFile:
    if not download.is_s3:
        return HttpFile(download.url, authorization(download, environment, variables))
    credentials = s3_credentials(download, environment, variables)
    return HttpFile(download.url, signer=S3Object.of(download, credentials))

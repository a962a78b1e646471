"""A real S3 server on loopback: Versity's gateway to a folder, which checks every signature.

`go install` builds the program once, into the testbed's cache (testbed.binaries); Go checks it
against its checksum database.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlion_api.errors import UnavailableError
from operator_process import free_ports
from testbed.binaries import build_once, cache_folder, go

VERSION = "v1.8.0"
_NAME = "versitygw"
_WITHIN_S = 20.0


def _folder() -> Path:
    return cache_folder() / f"{_NAME}-{VERSION}"


def built() -> Path | None:
    """The program; None if it is not built yet."""
    return _folder() / _NAME if (_folder() / ".complete").exists() else None


def build() -> Path:
    """Return the program; build it if needed (minutes). Raises: UnavailableError with Go's
    output."""
    build_once(_folder(), _make)
    return _folder() / _NAME


def _make(folder: Path) -> None:
    package = f"github.com/versity/versitygw/cmd/{_NAME}@{VERSION}"
    with tempfile.TemporaryDirectory(dir=folder) as made:
        go("install", "-trimpath", "-ldflags", "-s -w", package, env={"GOBIN": made}, module=folder)
        (Path(made) / _NAME).rename(folder / _NAME)


@dataclass(frozen=True)
class S3Server:
    """A server of buckets, which are folders, with one access key."""

    folder: Path
    url: str
    access_key_id: str = "dlion-tests"
    secret_access_key: str = "secret/of+tests="

    def put(self, bucket: str, key: str, content: bytes) -> None:
        path = self.folder / bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def serving(folder: Path, certificate: Path | None = None) -> Iterator[S3Server]:
    """Serve buckets below the folder; over https with a file of key and certificate."""
    program = built()
    assert program is not None
    (port,) = free_ports(1)
    scheme = "http" if certificate is None else "https"
    server = S3Server(folder / "buckets", f"{scheme}://127.0.0.1:{port}")
    metadata = folder / "metadata"  # beside: not each file system has extended attributes
    for each in (server.folder, metadata):
        each.mkdir(parents=True)
    tls = [] if certificate is None else ["--cert", str(certificate), "--key", str(certificate)]
    command = [str(program), "--port", f"127.0.0.1:{port}", "--quiet", *tls,
               "posix", "--sidecar", str(metadata), str(server.folder)]  # fmt: skip
    keys = {
        "ROOT_ACCESS_KEY": server.access_key_id,
        "ROOT_SECRET_KEY": server.secret_access_key,
    }
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **keys}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        _wait_for(port, process, log)
        yield server
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises: UnavailableError with the end of the server's output."""
    deadline_s = time.monotonic() + _WITHIN_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise UnavailableError(f"the S3 server did not start: {log.read_text()[-2000:]}")

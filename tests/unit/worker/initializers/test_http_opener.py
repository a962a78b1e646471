"""Tests of requests to hostile servers.

A request ends although a server sends single bytes at intervals. The body of a redirect is not
read. A loop of redirects ends the download.

Left out: redirects to plain http, and credentials (test_credentials, test_store).
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlion_api.errors import DataError, UnavailableError
from dlion_worker.initializers.http_file import HttpFile
from file_server import served

DRIPPED_BYTES = 400
MIB = 1024 * 1024


@dataclass
class HostileServer:
    """Answer each request with the same bytes, the last of them in parts of some size."""

    first: bytes
    rest: bytes
    part_bytes: int = 1
    pause_s: float = 0.001
    port: int = 0
    max_sent_bytes: int = 0
    """Bytes of the rest that one request got."""

    def answer(self, connection: socket.socket, is_over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(self.first)
        for end in range(self.part_bytes, len(self.rest) + 1, self.part_bytes):
            connection.sendall(self.rest[end - self.part_bytes : end])
            self.max_sent_bytes = max(self.max_sent_bytes, end)
            is_over.wait(self.pause_s)


@contextmanager
def serving(server: HostileServer) -> Iterator[HttpFile]:
    """A file from that server, for a client whose clock advances six seconds per reading."""
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                server.answer(connection, is_over)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.port = listener.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        times_s = itertools.count(step=6)
        try:
            yield HttpFile(
                f"http://127.0.0.1:{server.port}/data.npz",
                pause=lambda _s: None,
                clock=lambda: float(next(times_s)),
            )
        finally:
            is_over.set()
            socket.create_connection(("127.0.0.1", server.port)).close()
            thread.join()


def save(file: HttpFile, folder: Path) -> None:
    file.save(folder / "part", max_bytes=10**9, on_progress=lambda *_: None)


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 ",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n",
    ],
    ids=["status", "header", "chunk", "content"],
)
def test_single_bytes_at_intervals_do_not_hold_a_request(tmp_path: Path, first: bytes) -> None:
    server = HostileServer(first, b"0" * DRIPPED_BYTES)
    with serving(server) as file, pytest.raises(UnavailableError, match=r"only \d+ bytes in 6"):
        save(file, tmp_path)
    assert 0 < server.max_sent_bytes < DRIPPED_BYTES


def test_a_slow_refusal_ends_the_download(tmp_path: Path) -> None:
    first = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 400\r\n\r\n"
    server = HostileServer(first, b"0" * DRIPPED_BYTES)
    with serving(server) as file, pytest.raises(DataError, match="HTTP 403 Forbidden"):
        save(file, tmp_path)
    assert 0 < server.max_sent_bytes < DRIPPED_BYTES


def test_the_body_of_a_redirect_is_not_read(tmp_path: Path) -> None:
    with served(b"content") as target:
        first = f"HTTP/1.1 302 Found\r\nLocation: {target.url}\r\n\r\n".encode()
        server = HostileServer(first, bytes(64 * MIB), part_bytes=MIB, pause_s=0.0)
        with serving(server) as file:
            save(file, tmp_path)
    assert (tmp_path / "part").read_bytes() == b"content"
    assert server.max_sent_bytes < 32 * MIB, "at most the buffers of sockets"


def test_a_loop_of_redirects_ends_the_download(tmp_path: Path) -> None:
    with served(b"content") as file:
        file.failures, file.redirect_to = ["redirect"] * 99, file.url
        with pytest.raises(DataError, match="infinite loop"):
            save(HttpFile(file.url), tmp_path)

"""A real HTTP server on loopback that serves one file, and fails as a test tells it to."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class ServedFile:
    """The file, how the next requests fail, and what was asked."""

    content: bytes
    has_ranges: bool = True
    has_length: bool = True
    failures: list[int | str] = field(default_factory=list)
    """For each coming request: a status code, `cut` (half of the content), `cut N` (N bytes),
    `reset` (half, then the connection is reset), `shift` (another range) or `redirect`."""
    authorization: str = ""
    """What a request must have; empty: anything."""
    redirect_to: str = ""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of each request."""
    received: threading.Event = field(default_factory=threading.Event)
    """Set by the test before a `reset`, which drops what the client has not read."""
    url: str = ""


@contextmanager
def served(content: bytes, name: str = "data.npz") -> Iterator[ServedFile]:
    """Serve the content under that name at a free port."""
    file = ServedFile(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, file)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    file.url = f"http://127.0.0.1:{server.server_port}/files/{name}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield file
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _answer(request: BaseHTTPRequestHandler, file: ServedFile) -> None:
    file.requests.append(dict(request.headers))
    failure = file.failures.pop(0) if file.failures else 200
    if file.authorization and request.headers.get("Authorization") != file.authorization:
        failure = 401
    if failure == "redirect":
        request.send_response(302)
        request.send_header("Location", file.redirect_to)
        request.end_headers()
        return
    if isinstance(failure, int) and failure != 200:
        request.send_error(failure)
        return
    start = 0
    wanted = request.headers.get("Range", "")
    if wanted and file.has_ranges:
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) + (failure == "shift")
        if start >= len(file.content):
            request.send_error(416)
            return
        request.send_response(206)
        end = len(file.content)
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
    else:
        request.send_response(200)
    sent = file.content[start:]
    if file.has_length:
        request.send_header("Content-Length", str(len(sent)))
    request.end_headers()
    request.wfile.write(sent[: _sent_bytes(str(failure), len(sent))])
    if failure == "reset":
        file.received.wait(5)
        reset = struct.pack("ii", 1, 0)
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        os.close(request.connection.detach())  # before the server shuts it down in order


def _sent_bytes(failure: str, size: int) -> int:
    kind, _, count = failure.partition(" ")
    return {"cut": int(count or size // 2), "reset": size // 2}.get(kind, size)

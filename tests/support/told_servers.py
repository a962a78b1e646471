"""API servers that answer what they are told, and a kubeconfig with a context for each of them.

For tests of what the command line makes of answers; a real API server stands in tests/cluster.
"""

from __future__ import annotations

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Answer = tuple[int, str]
"""A code and a body."""


class Server:
    """What one answers, by the last part of the path; a watch gets what `watch` is."""

    def __init__(self, answers: Mapping[str, Answer], *, ahead_s: float = 0.0) -> None:
        """Its clock goes `ahead_s` ahead of this machine's."""
        self._answers = answers
        self.asked: list[str] = []
        """The paths of all requests."""
        self.ahead_s = ahead_s

    def answer(self, address: str) -> Answer:
        """What a request for that address gets; 503 where nothing was told."""
        path = urlsplit(address)
        self.asked.append(path.path)
        last = path.path.rpartition("/")[2]
        kind = "watch" if "watch" in parse_qs(path.query) else last
        return self._answers.get(kind, (503, "{}"))


@contextlib.contextmanager
def served(path: Path, servers: Mapping[str, Server | None]) -> Iterator[str]:
    """A kubeconfig file there with a context of each name; where there is None nothing listens."""
    with contextlib.ExitStack() as stack:
        clusters = [
            {"name": name, "cluster": {"server": stack.enter_context(_listening(server))}}
            for name, server in servers.items()
        ]
        contexts = [
            {"name": name, "context": {"cluster": name, "namespace": "ml"}} for name in servers
        ]
        document = {"current-context": next(iter(servers)), "clusters": clusters}
        path.write_text(yaml.safe_dump(document | {"contexts": contexts}))
        yield str(path)


@contextlib.contextmanager
def _listening(told: Server | None) -> Iterator[str]:
    if told is None:
        yield "http://127.0.0.1:9"
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = told.answer(self.path)
            self.send_response(code)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() + told.ahead_s)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()

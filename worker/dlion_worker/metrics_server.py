"""Serves a registry's metrics over HTTP, with limits that prometheus_client's own server lacks.

Any pod may reach this port. prometheus_client starts a thread for each connection, which waits for
a request without end.
"""

import io
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

MAX_CONNECTIONS: Final = 64
"""The oldest is closed for a further one, so that a new caller is served."""
CONNECTION_WITHIN_S: Final = 10.0
"""How long a connection may last: it has one request."""
MAX_HEAD_BYTES: Final = 16 * 1024
"""The request line and all headers; what follows is not read."""


class _Head(io.BufferedReader):
    """Ends after `MAX_HEAD_BYTES`."""

    _left = MAX_HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        limit = self._left if size is None or size < 0 else min(size, self._left)
        line = super().readline(limit)
        self._left -= len(line)
        return line


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = _Head(self.connection.makefile("rb", buffering=0))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Log nothing."""


class MetricsServer(ThreadingWSGIServer):
    """Closes connections that last too long, and the oldest for each one over the limit."""

    request_queue_size = MAX_CONNECTIONS
    """socketserver's 5 would make a caller wait for a second or more beside a few others."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """When each connection must have ended, the oldest first."""
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            excess = list(self._open)[: max(0, len(self._open) + 1 - MAX_CONNECTIONS)]
            self._open[request] = time.monotonic() + CONNECTION_WITHIN_S
        self._end(excess)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Runs every half second, and after each connection."""
        super().service_actions()
        now_s = time.monotonic()
        with self._lock:
            late = [each for each, end_s in self._open.items() if end_s <= now_s]
        self._end(late)

    def _end(self, connections: list[socket.socket]) -> None:
        """Wake the threads of these connections, which close them."""
        for each in connections:
            with suppress(OSError):  # it ended meanwhile
                each.shutdown(socket.SHUT_RDWR)


class _MetricsServer6(MetricsServer):
    address_family = socket.AF_INET6


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serve in a thread, until `shutdown`. Raises: OSError if the address is unavailable."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_ = found[0]
    kind = _MetricsServer6 if family == socket.AF_INET6 else MetricsServer
    server = make_server(host, port, make_wsgi_app(registry), kind, _Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server

"""API servers with scripted answers, and a kubeconfig with a context for each of them.

For tests of how the command line handles answers. Tests with a real API server are in
tests/cluster.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import yaml

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterator, Mapping
    from email.message import Message

Answer = tuple[int, str]
"""A status code and a body."""
PATCHES = "PATCH"
"""The key of the answer to every patch or deletion."""


@dataclass(frozen=True)
class ServedTls:
    """The TLS certificate of a server."""

    chain: Path
    """PEM of its certificate and key."""
    trusted: Path
    """PEM of the authority in the kubeconfig."""
    clients: Path | None = None
    """PEM of the authority whose certificates the server demands; None: it demands none."""

    def context(self) -> ssl.SSLContext:
        """Return what accepts connections."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.chain)
        if self.clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.clients)
        return context


class Server:
    """Scripted answers, by the last part of the path; a watch gets those of `watch`.

    An answer may be a function, which is called for each request.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer | Callable[[], Answer]],
        *,
        ahead_s: float = 0.0,
        denied: Collection[str] = (),
        silent: Collection[str] = (),
        tls: ServedTls | None = None,
        kept: Path | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> None:
        """Its clock is `ahead_s` ahead of this machine's.

        `denied`: rights that a review refuses, as `verb resource/subresource`. `silent`: last parts
        of paths that get no answer. `user`: the user's credentials in the kubeconfig. `kept`: a
        keeper's disk, on which commands in pods run; without it, they fail.
        """
        self._answers = answers
        self.asked: list[str] = []
        """The paths of all requests."""
        self.headers: list[Message] = []
        """The headers of each request, including WebSocket requests."""
        self.certificates: list[bytes] = []
        """In DER: the certificate of the client of each request with one."""
        self.patches: list[tuple[str, str, str]] = []
        """The address, content type and body of each patch or deletion."""
        self.ahead_s = ahead_s
        self.denied, self.silent, self.tls, self.user = denied, silent, tls, user
        self.kept = kept
        self.ended = threading.Event()

    def run(self, address: str) -> Iterator[bytes]:
        """The frames of a command in a pod: the output of the keeper's own program on that disk."""
        command = parse_qs(urlsplit(address).query)["command"][1:]
        done = subprocess.run(
            [sys.executable, *command[:2], "--root", str(self.kept), *command[2:]],
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        for start in range(0, len(done.stdout), 30_000):
            yield frame(1, done.stdout[start : start + 30_000])
        yield frame(2, done.stderr)
        ended = {"status": "Failure" if done.returncode else "Success"}
        yield frame(3, json.dumps(ended).encode())
        yield b"\x88\x00"

    def answer(self, address: str) -> Answer:
        """The answer to a request for that address; 503 without a scripted answer."""
        path = urlsplit(address)
        self.asked.append(path.path)
        last = path.path.rpartition("/")[2]
        kind = "watch" if "watch" in parse_qs(path.query) else last
        if kind in self.silent:
            self.ended.wait()
        return self._answer(kind)

    def patched(self, address: str, content_type: str, body: str) -> Answer:
        """The answer to a patch or deletion."""
        self.patches.append((address, content_type, body))
        return self._answer(PATCHES)

    def _answer(self, kind: str) -> Answer:
        answer = self._answers.get(kind, (503, "{}"))
        return answer if isinstance(answer, tuple) else answer()

    def review(self, body: bytes) -> Answer:
        """The answer to a review of the user's own rights."""
        asked = json.loads(body)["spec"]["resourceAttributes"]
        sub = f"/{asked['subresource']}" if asked["subresource"] else ""
        allowed = f"{asked['verb']} {asked['resource']}{sub}" not in self.denied
        return 201, json.dumps({"status": {"allowed": allowed}})


def frame(channel: int, content: bytes) -> bytes:
    """A message on that channel of a command in a pod, at most 65,534 bytes."""
    whole = bytes([channel]) + content
    return b"\x82\x7e" + len(whole).to_bytes(2, "big") + whole


@contextlib.contextmanager
def served(path: Path, servers: Mapping[str, Server | None]) -> Iterator[str]:
    """Write a kubeconfig file with a context of each name; the address of None has no listener."""
    with contextlib.ExitStack() as stack:
        clusters = [
            {"name": name, "cluster": stack.enter_context(_listening(server))}
            for name, server in servers.items()
        ]
        users = {name: dict(each.user) for name, each in servers.items() if each and each.user}
        contexts: list[dict[str, Any]] = [
            {"name": name, "context": {"cluster": name, "namespace": "ml"}} for name in servers
        ]
        for each in contexts:
            if each["name"] in users:
                each["context"]["user"] = each["name"]
        document = {"current-context": next(iter(servers)), "clusters": clusters}
        listed = [{"name": name, "user": user} for name, user in users.items()]
        path.write_text(yaml.safe_dump(document | {"contexts": contexts, "users": listed}))
        yield str(path)


def server_url(file: str, name: str) -> str:
    """The URL of the cluster of that name in the kubeconfig file."""
    clusters = yaml.safe_load(Path(file).read_text())["clusters"]
    return next(str(each["cluster"]["server"]) for each in clusters if each["name"] == name)


def _shown(connection: socket.socket) -> list[bytes]:
    """The client's certificate, if it has presented one."""
    shown = connection.getpeercert(True) if isinstance(connection, ssl.SSLSocket) else None
    return [shown] if shown else []


class _AllAtOnce(ThreadingHTTPServer):
    """Accepts as many connections at once as a command opens; a refused one would wait 1 s."""

    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may have gone. A traceback would be printed during a later test."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def _listening(script: Server | None) -> Iterator[dict[str, str]]:
    if script is None:
        yield {"server": "http://127.0.0.1:9"}
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.headers.append(self.headers)
            script.certificates += _shown(self.connection)
            if script.kept is not None and urlsplit(self.path).path.endswith("/exec"):
                self._run()
            else:
                self._send(*script.answer(self.path))

        def _run(self) -> None:
            magic = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
            accept = base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()
            self.send_header("Sec-WebSocket-Accept", accept)
            self.end_headers()
            for each in script.run(self.path):
                self.wfile.write(each)
            self.connection.recv(65536)  # the client closes, too
            self.close_connection = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = script.answer(self.path)
            self._send(*(script.review(body) if answer[0] == 503 else answer))

        def do_PATCH(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._send(*script.patched(self.path, self.headers["Content-Type"], body))

        do_DELETE = do_PATCH

        def _send(self, code: int, text: str) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() + script.ahead_s)

        def log_message(self, *_: object) -> None:
            pass

    with _AllAtOnce(("127.0.0.1", 0), Handler) as server:
        cluster = {"server": f"http://127.0.0.1:{server.server_address[1]}"}
        if script.tls is not None:
            server.socket = script.tls.context().wrap_socket(server.socket, server_side=True)
            cluster = {"server": cluster["server"].replace("http:", "https:")}
            cluster["certificate-authority"] = str(script.tls.trusted)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        try:
            yield cluster
        finally:
            script.ended.set()
            server.shutdown()

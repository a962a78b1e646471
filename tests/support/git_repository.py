"""A git repository of a test, served over HTTP on loopback by git's own backend."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60
_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "tests",
    "GIT_AUTHOR_EMAIL": "tests@dlion.test",
    "GIT_COMMITTER_NAME": "tests",
    "GIT_COMMITTER_EMAIL": "tests@dlion.test",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


@dataclass(frozen=True)
class GitRepository:
    """A repository with its working tree; `main` is its branch."""

    folder: Path

    @classmethod
    def new(cls, folder: Path) -> GitRepository:
        """Create an empty repository."""
        made = cls(folder)
        folder.mkdir()
        made._git("init", "--quiet", "--initial-branch=main")
        return made

    def commit(self, message: str) -> str:
        """Commit the working tree; return the revision as Flux names it."""
        self._git("add", "--all")
        self._git("commit", "--quiet", f"--message={message}")
        return f"main@sha1:{self._git('rev-parse', 'HEAD').strip()}"

    def tag(self, name: str) -> None:
        """Tag the newest commit."""
        self._git("tag", name)

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.folder,
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        return done.stdout


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve the repositories of that folder, read-only, at `http://127.0.0.1:PORT`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Backend, root))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Backend(BaseHTTPRequestHandler):
    """Each request is one call of `git http-backend`, by the rules of CGI (RFC 3875)."""

    def __init__(self, root: Path, *arguments: Any) -> None:
        self._root = root
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a request for references."""
        self._answer()

    def do_POST(self) -> None:
        """Answer a request for objects."""
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing, to keep the output of the tests clean."""

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length") or 0)
        environment = {
            "GIT_PROJECT_ROOT": str(self._root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(length),
        }
        done = subprocess.run(
            ["git", "http-backend"],
            input=self.rfile.read(length),
            env={**os.environ, **_ENVIRONMENT, **environment},
            capture_output=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        head, _, body = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        code, _, reason = headers.pop("Status", "200 OK").partition(" ")
        self.send_response(int(code), reason)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

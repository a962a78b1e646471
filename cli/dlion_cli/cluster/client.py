"""A client of one cluster's API server: requests, streams, and commands in pods.

`connections` configures it. `cluster_jobs` knows the API of jobs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

from dlion_api.bounds import LABEL_FORM
from dlion_api.errors import DataError, DLionError, Problem, SpecError, UnavailableError
from dlion_cli.cluster.api_errors import api_error, unreachable_error
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.connections import Connection, open_connection, require_packages
from dlion_cli.cluster.kubeconfig import choose_context
from dlion_cli.terminal.formatting import printable_lines

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 60.0
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
_JSON: Final = "application/json"
_STDOUT, _STDERR, _ERROR = 1, 2, 3
"""Channels of the exec WebSocket (v4.channel.k8s.io and v5)."""
_MAX_STDERR_BYTES: Final = 16 * 1024
_MAX_NAMESPACE_LENGTH: Final = 63


@dataclass(frozen=True)
class ApiResponse:
    """A response: the document, and whether the request created the object."""

    document: dict[str, Any]
    is_new: bool = False
    date: str = ""
    """The `Date` header; may be empty."""


def api_path(*parts: str) -> str:
    """An API path from its parts, each percent-encoded. What is not UTF-8 becomes `?`.

    >>> api_path("api", "v1", "namespaces", "a/b")
    '/api/v1/namespaces/a%2Fb'
    """
    return "".join(f"/{quote(part, safe='', errors='replace')}" for part in parts)


def checked_name(name: str, kind: str, field: str, form: Mapping[str, Any], length: int) -> str:
    """The name, if it has this form of `bounds` and at most this length. Raises: SpecError.

    In an address, an empty name or `..` would stand for all objects.
    """
    if len(name) > length or not re.fullmatch(form["pattern"], name):
        allowed = f"{form['pattern_description']}, at most {length} characters"
        problem = Problem(field, f"is not a {kind}'s name", repr(name[: length + 1]), allowed)
        raise SpecError([problem])
    return name


class ClusterClient:
    """A connection to one API server, with a default namespace. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        *,
        context: str,
        namespace: str,
        impersonation: Sequence[tuple[str, str]] = (),
        timeout_s: float | None = None,
    ) -> None:
        """`impersonation`: headers of each request. `timeout_s`: longest silence in a response.

        0: no limit. Without it, the limits of the requests apply.
        """
        self._connection = connection
        self._impersonation = tuple(impersonation)
        self._timeout_s = timeout_s
        self.context = context
        self.namespace = namespace

    @property
    def server(self) -> str:
        """The server's URL, for messages."""
        return self._connection.server

    def in_namespace(self, namespace: str) -> ClusterClient:
        """The same connection with another namespace."""
        there = copy.copy(self)
        there.namespace = namespace
        return there

    def core_path(self, *parts: str) -> str:
        """The path of core objects in the namespace: `core_path("pods", name, "log")`."""
        return api_path("api", "v1", "namespaces", self.namespace, *parts)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = _JSON,
        timeout_s: float | None = None,
    ) -> ApiResponse:
        """Send one request. `timeout_s`: its longest silence, if it is shorter than the user's.

        Raises: DLionError if the API server rejects it (`api_error`); UnavailableError if there is
        no response.
        """
        silence_s = self.silence_s(timeout_s)
        with self._send(method, path, query, body, content_type, silence_s) as response:
            return ApiResponse(
                _document(response.data, self.server),
                is_new=response.status == 201,
                date=response.headers.get("Date", ""),
            )

    def get(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One document. Raises: as `request`."""
        return self.request("GET", path, query=query, timeout_s=timeout_s).document

    def read_text(self, path: str, *, max_bytes: int, within_s: float) -> str:
        """A text that the API server proxies.

        Raises: as `request`; UnavailableError if it exceeds `max_bytes`, or `within_s` or the
        user's limit.
        """
        within_s = self._shortened(within_s)
        end_s = time.monotonic() + within_s
        content = b""
        with self._send("GET", path, None, None, _JSON, within_s) as response:
            while chunk := response.read1(64 * 1024):  # `stream` waits for a whole chunk
                content += chunk
                if len(content) > max_bytes or time.monotonic() > end_s:
                    raise UnavailableError(
                        f"{path}: the response did not end within {max_bytes} bytes and "
                        f"{within_s:g} s"
                    )
        return content.decode("utf-8", "replace")

    def stream_lines(
        self, path: str, query: Mapping[str, str], *, silence_s: float | None
    ) -> Iterator[bytes]:
        """Lines of a response as they arrive, without line ends.

        Raises: as `request`, also during the stream; UnavailableError if the stream breaks, or is
        silent for `silence_s`.
        """
        with self._send("GET", path, query, None, _JSON, silence_s) as response:
            rest = b""
            for chunk in response.stream(64 * 1024):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
            if rest:
                yield rest

    def exec_command(
        self, pod: str, container: str, command: Sequence[str]
    ) -> Generator[bytes, None, None]:
        """Run a command in a pod and yield its output. The caller closes the generator.

        Raises: UnavailableError if the connection breaks; DataError with the command's error output
        if it fails; and as `request`.
        """
        from websocket import ABNF

        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in command]
        errors = status = b""
        with self._socket(self.core_path("pods", pod, "exec"), query) as socket:
            while True:
                opcode, frame = self._frame(socket)
                if opcode == ABNF.OPCODE_CLOSE:
                    break
                if opcode not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame:
                    continue
                channel, content = frame[0], frame[1:]
                if channel == _STDOUT and content:
                    yield content
                elif channel == _STDERR:
                    errors = (errors + content)[-_MAX_STDERR_BYTES:]
                elif channel == _ERROR:
                    status += content
        _check_exit_status(status, errors, pod)

    def bearer_token(self) -> str:
        """The token that the next request would have; empty without one. Never print it."""
        kind, _, token = self._headers().get("authorization", "").partition(" ")
        return token if kind.lower() == "bearer" else ""

    def client_certificate(self) -> bytes:
        """The PEM of the client's certificate; empty without one."""
        return self._connection.credentials.certificate or b""

    def close(self) -> None:
        """Close the connections."""
        self._connection.pool.clear()

    def silence_s(self, timeout_s: float | None = None) -> float | None:
        """The longest silence in a response; None: there is no limit."""
        if timeout_s is not None:
            return self._shortened(timeout_s)
        return READ_TIMEOUT_S if self._timeout_s is None else self._timeout_s or None

    def _shortened(self, limit_s: float) -> float:
        return min(limit_s, self._timeout_s or limit_s)

    def _headers(self) -> dict[str, str]:
        """Authentication headers; expired tokens and plugin credentials are renewed here.

        Raises: UnavailableError for those that cannot be renewed; DataError for a token that no
        header can carry; it does not print it.
        """
        self._connection.renew()
        authorization = self._connection.credentials.authorization
        if authorization is None:
            return {}
        value = authorization()
        if not value.isascii() or not value.isprintable():
            raise DataError(
                f"the token of context {self.context!r} has a line break or a character that is "
                "not ASCII: take a new kubeconfig"
            )
        return {"authorization": value}

    @contextlib.contextmanager
    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: object,
        content_type: str,
        silence_s: float | None,
    ) -> Iterator[Any]:
        import urllib3

        url = self.server + path + (f"?{urlencode(query, errors='replace')}" if query else "")
        headers = urllib3.HTTPHeaderDict({"Accept": f"{_JSON}, */*", "User-Agent": "dlion"})
        if body is not None:
            headers["Content-Type"] = content_type
        for name, value in (*self._headers().items(), *self._impersonation):
            headers.add(name, value)  # a group each in a separate header
        connect_s = self._shortened(CONNECT_TIMEOUT_S)
        try:
            response = self._connection.pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=connect_s, read=silence_s),
                retries=False,
                preload_content=False,
            )
            try:
                if response.status >= 400:
                    raise self._refusal(response.status, response.data, path)
                yield response
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            raise unreachable_error(self.server, error, context=self.context) from error

    @contextlib.contextmanager
    def _socket(self, path: str, query: Sequence[tuple[str, str]]) -> Iterator[Any]:
        import urllib3
        from websocket import WebSocketBadStatusException, WebSocketException

        headers = [*self._headers().items(), *self._impersonation]
        address = f"{path}?{urlencode(query, errors='replace')}"
        try:
            socket = self._connection.open_websocket(address, headers, timeout_s=self.silence_s())
        except WebSocketBadStatusException as error:
            body = getattr(error, "resp_body", b"") or b""
            raise self._refusal(error.status_code, body, path) from error
        except (WebSocketException, OSError, urllib3.exceptions.HTTPError) as error:
            raise unreachable_error(self.server, error, context=self.context) from error
        try:
            yield socket
        finally:
            socket.close()  # no effect if the server closed first
            socket.shutdown()

    def _refusal(self, status: int, body: bytes, path: str) -> DLionError:
        if status == 401:
            self._connection.credentials.refused()
        return api_error(status, body, path=path, context=self.context)

    def _frame(self, socket: Any) -> tuple[int, bytes]:
        from websocket import WebSocketException

        try:
            opcode, frame = socket.recv_data_frame(True)
        except (WebSocketException, OSError) as error:
            raise unreachable_error(self.server, error, context=self.context) from error
        return opcode, bytes(frame.data)


def connect(settings: ConnectionSettings) -> ClusterClient:
    """The cluster that these options select, by kubectl's rules. Sends no request.

    Raises: DataError if the configuration is missing or invalid; SpecError for what can be no
    namespace; UnavailableError if a package is not installed.
    """
    require_packages()
    chosen = choose_context(settings)
    namespace = settings.namespace or chosen.namespace
    checked_name(namespace, "namespace", "namespace", LABEL_FORM, _MAX_NAMESPACE_LENGTH)
    return ClusterClient(
        open_connection(settings, chosen),
        context=chosen.name or "(options)",
        namespace=namespace,
        impersonation=settings.impersonation or chosen.impersonation,
        timeout_s=settings.request_timeout_s,
    )


def _document(content: bytes, server: str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise UnavailableError(
            f"{server} answers {content[:80]!r}, which is not a JSON document. Check that it is a "
            "Kubernetes API server and that no proxy intercepts the request"
        )
    items = document.get("items") or []
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise UnavailableError(
            f"{server} answers with items that are no list of objects: {str(items)[:80]!r}. Check "
            "that it is a Kubernetes API server"
        )
    return document


def _check_exit_status(frame: bytes, errors: bytes, pod: str) -> None:
    """Check the status that the kubelet sends last. Raises: DataError, UnavailableError."""
    try:
        status = json.loads(frame)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict):
        raise UnavailableError(f"pod {pod}: the connection broke before the command had ended")
    if status.get("status") != "Success":
        message = errors.decode("utf-8", "replace").strip() or str(status.get("message", ""))
        raise DataError(f"pod {pod}: " + printable_lines(message))

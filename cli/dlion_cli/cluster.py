"""One cluster's API server: requests, streams and commands in pods, and its errors in our words.

The only module of the command line that imports the Kubernetes client, which it does when it
connects: it finds the server and proves who the user is (certificates, tokens, exec plugins,
proxies, in-cluster). Answers are plain documents, whose quantities it reads. What a job is,
`cluster_jobs` knows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from dlion_api.document.scalars import LONGEST_QUANTITY, QUANTITY
from dlion_api.errors import DataError, UnavailableError
from dlion_cli.cluster_refusals import refusal, unreachable
from dlion_cli.kubeconfig import chosen_context, pod_namespace

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 60.0
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"
_JSON: Final = "application/json"
_STDOUT, _STDERR, _ERROR = 1, 2, 3
"""Channels of a command's WebSocket (v4.channel.k8s.io and v5)."""
_MOST_WORDS_BYTES: Final = 16 * 1024
_LARGEST_QUANTITY: Final = Decimal(2**63 - 1)
"""Kubernetes takes a larger one for this."""


@dataclass(frozen=True)
class Answer:
    """What came back, when by the server's clock, and whether this request made the object."""

    document: dict[str, Any]
    is_new: bool = False
    date: str = ""
    """As in the header of that name; empty where there is none."""


def path_of(*parts: str) -> str:
    """An address from its parts, each of them quoted.

    >>> path_of("api", "v1", "namespaces", "a/b")
    '/api/v1/namespaces/a%2Fb'
    """
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def quantity(text: str) -> Decimal:
    """The number that is meant, in the unit of the resource: cores, bytes, devices.

    Raises: ValueError where it is none.

    >>> quantity("500m"), quantity("1.5Gi"), quantity("1e3")
    (Decimal('0.500'), Decimal('1610612736.0'), Decimal('1E+3'))
    """
    from kubernetes import utils

    reading: Any = utils  # its functions have no types
    # It would also take what Kubernetes does not, such as NaN.
    if len(text) > LONGEST_QUANTITY or not re.fullmatch(QUANTITY, text):
        raise ValueError(f"{text[:LONGEST_QUANTITY]!r} is no quantity")
    try:
        number: Decimal = reading.parse_quantity(text)
    except ValueError:  # an exponent with a fraction, as the pattern allows it
        raise ValueError(f"{text!r} is no quantity") from None
    return max(-_LARGEST_QUANTITY, min(number, _LARGEST_QUANTITY))


class Cluster:
    """A connection to one API server, and the namespace that is meant there. For many threads."""

    def __init__(self, client: Any, *, context: str, namespace: str) -> None:
        self._client = client
        self.context = context
        self.namespace = namespace

    @property
    def server(self) -> str:
        """Its address, for messages."""
        return str(self._client.configuration.host)

    def within(self, namespace: str) -> Cluster:
        """The same connection, another namespace."""
        return Cluster(self._client, context=self.context, namespace=namespace)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = _JSON,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> Answer:
        """One request and its answer.

        Raises: DLionError, in our words, for whatever the API server refuses (`refusal`);
        UnavailableError where it does not answer.
        """
        with self._sent(method, path, query, body, content_type, timeout_s) as response:
            return Answer(
                _document(response.data, self.server),
                is_new=response.status == 201,
                date=response.headers.get("Date", ""),
            )

    def get(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> dict[str, Any]:
        """One document. Raises as `request` does."""
        return self.request("GET", path, query=query, timeout_s=timeout_s).document

    def text(self, path: str, *, most_bytes: int, within_s: float) -> str:
        """A text of something in the cluster that the API server passes on.

        Raises as `request` does; UnavailableError where it is longer, or takes longer in all.
        """
        end_s = time.monotonic() + within_s
        content = b""
        with self._sent("GET", path, None, None, _JSON, within_s) as response:
            for chunk in response.stream(64 * 1024):
                content += chunk
                if len(content) > most_bytes or time.monotonic() > end_s:
                    raise UnavailableError(
                        f"{path}: {len(content)} bytes and no end; at most {most_bytes} are read, "
                        f"for {within_s:g} s"
                    )
        return content.decode("utf-8", "replace")

    def lines(
        self, path: str, query: Mapping[str, str], *, silence_s: float | None
    ) -> Iterator[bytes]:
        """Lines of an answer as they come, without their ends.

        Raises as `request` does, also in the midst of it: UnavailableError where the stream breaks
        or nothing comes for `silence_s`.
        """
        with self._sent("GET", path, query, None, _JSON, silence_s) as response:
            rest = b""
            for chunk in response.stream(64 * 1024):
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole
            if rest:
                yield rest

    def command(
        self, namespace: str, pod: str, container: str, command: Sequence[str]
    ) -> Generator[bytes, None, None]:
        """What a command in a pod writes to its output, as it comes; to be closed by the caller.

        Raises: UnavailableError where the connection breaks, DataError with what the command said
        where it ends with an error; and as `request` does.
        """
        from websocket import ABNF

        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in command]
        path = path_of("api", "v1", "namespaces", namespace, "pods", pod, "exec")
        words = ending = b""
        with self._socket(path, query) as socket:
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
                    words = (words + content)[-_MOST_WORDS_BYTES:]
                elif channel == _ERROR:
                    ending += content
        _check_ending(ending, words, pod)

    def close(self) -> None:
        """Let the connections go."""
        self._client.rest_client.pool_manager.clear()

    def _headers(self) -> dict[str, str]:
        """Who the user is; a token or plugin's credential is renewed here where it has expired."""
        settings = self._client.configuration.auth_settings().values()
        return {each["key"]: each["value"] for each in settings if each["in"] == "header"}

    @contextlib.contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: object,
        content_type: str,
        silence_s: float | None,
    ) -> Iterator[Any]:
        import urllib3

        url = self.server + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": f"{_JSON}, */*", "User-Agent": "dlion", **self._headers()}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            response = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=silence_s),
                retries=False,
                preload_content=False,
            )
            try:
                if response.status >= 400:
                    raise refusal(response.status, response.data, context=self.context)
                yield response
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            raise unreachable(self.server, error, context=self.context) from error

    @contextlib.contextmanager
    def _socket(self, path: str, query: Sequence[tuple[str, str]]) -> Iterator[Any]:
        from kubernetes.stream import ws_client
        from websocket import WebSocketBadStatusException, WebSocketException

        address = "ws" + self.server.removeprefix("http") + f"{path}?{urlencode(query)}"
        headers = {name.lower(): value for name, value in self._headers().items()}
        try:
            open_socket: Any = ws_client.create_websocket
            socket = open_socket(self._client.configuration, address, headers)
        except WebSocketBadStatusException as error:
            said = getattr(error, "resp_body", b"") or b""
            raise refusal(error.status_code, said, context=self.context) from error
        except (WebSocketException, OSError) as error:
            raise unreachable(self.server, error, context=self.context) from error
        socket.settimeout(READ_TIMEOUT_S)
        try:
            yield socket
        finally:
            socket.close()  # does nothing where the other side has closed first
            socket.shutdown()

    def _frame(self, socket: Any) -> tuple[int, bytes]:
        from websocket import WebSocketException

        try:
            opcode, frame = socket.recv_data_frame(True)
        except (WebSocketException, OSError) as error:
            raise unreachable(self.server, error, context=self.context) from error
        return opcode, bytes(frame.data)


def connect(
    *, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None
) -> Cluster:
    """The cluster that these name, by kubectl's rules; sends nothing yet.

    Raises: DataError where the configuration is missing or wrong; UnavailableError where the
    Kubernetes client is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UnavailableError(
            f"the Kubernetes client for Python is missing ({error}). Install it: "
            "pip install 'dlion[cluster]'"
        ) from None
    loading: Any = config  # its functions have no types
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # what it warns of we say ourselves
    chosen = chosen_context(kubeconfig, context)
    settings = client.Configuration()
    settings.keep_alive = True
    try:
        if chosen is None:
            loading.load_incluster_config(client_configuration=settings)
            return Cluster(
                client.ApiClient(settings),
                context="(this pod)",
                namespace=namespace or pod_namespace(),
            )
        with _complaints() as complaints:
            loading.load_kube_config(
                config_file=chosen.files,
                context=chosen.name,
                client_configuration=settings,
                persist_config=False,
            )
        if complaints:
            raise ValueError("; ".join(complaints))
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
        where = "this pod" if chosen is None else f"kubeconfig {chosen.files}"
        raise DataError(f"{where}: cannot be used: {error}") from error
    return Cluster(
        client.ApiClient(settings), context=chosen.name, namespace=namespace or chosen.namespace
    )


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """Errors that are logged inside: of a plugin that fails the client tells nobody else."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _document(content: bytes, server: str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise UnavailableError(
            f"{server} answers {content[:80]!r}, and no JSON document: is it a Kubernetes API "
            "server, and is no proxy in its way?"
        )
    return document


def _check_ending(ending: bytes, words: bytes, pod: str) -> None:
    """The command's end as the kubelet tells it. Raises: DataError, UnavailableError."""
    try:
        status = json.loads(ending)
    except ValueError:
        raise UnavailableError(
            f"pod {pod}: the connection broke before the command had ended"
        ) from None
    if status.get("status") != "Success":
        said = words.decode("utf-8", "replace").strip() or str(status.get("message", ""))
        raise DataError(f"pod {pod}: {said}")

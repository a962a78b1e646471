"""A proxy for an API server that records every request and causes faults on command.

It serves plain HTTP on a free port of 127.0.0.1 and writes its own kubeconfig. It calls the real
API server with the credentials of the given kubeconfig. It runs in a thread, so that a test may
block. It does not interpret what it forwards.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import yaml
from aiohttp import web

from dlion_api.errors import UnavailableError
from operator_process import free_ports

if TYPE_CHECKING:
    from types import TracebackType

_HOP = frozenset({"connection", "transfer-encoding", "content-length", "host", "authorization"})
_NOT_PASSED_BACK = _HOP | {"content-encoding"}


@dataclass
class Request:
    """One request and its answer; code 0 means not answered (yet)."""

    method: str
    path: str
    dry_run: bool
    watch: bool
    code: int = 0
    at_s: float = field(default_factory=time.monotonic)
    """When it arrived."""

    @property
    def mutating(self) -> bool:
        """Whether the request changes an object other than an event."""
        return self.writing and "/events" not in self.path

    @property
    def writing(self) -> bool:
        """Whether the API server stores data of the request, events included. Excluded are Leases,
        which an operator renews every few seconds."""
        is_write = self.method in ("POST", "PUT", "PATCH", "DELETE") and not self.dry_run
        return is_write and "/leases" not in self.path

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Gate:
    """Holds the first mutating request: before it is forwarded, or before its answer is."""

    where: str
    events: bool = False
    """Whether to hold only the first request that creates an event."""
    reached: threading.Event = field(default_factory=threading.Event)
    request: Request | None = None

    def takes(self, request: Request) -> bool:
        """Whether to hold this request."""
        return request.writing and request.mutating != self.events


@dataclass(frozen=True)
class Answer:
    """The proxy's own answer to requests that match."""

    code: int
    matches: Callable[[Request], bool]
    headers: tuple[tuple[str, str], ...] = ()


class FaultProxy:
    """The proxy; a context that serves it. The test's thread may set attributes."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.requests: list[Request] = []
        self.answer: Answer | None = None
        """The proxy's answer in place of the API server's; None to forward all."""
        self.delay_s = 0.0
        """The delay of every answer."""
        self.silent = False
        """Whether to drop all watch events."""
        self.clock_ahead_s = 0.0
        """The time by which the answers' dates are ahead of the API server's clock."""
        self.kubeconfig = folder / "through-the-proxy.yaml"
        self._gate: Gate | None = None
        self._watches: dict[int, web.Request] = {}
        self._port = free_ports(1)[0]
        self._server, self._ssl, self._authorization = _upstream(kubeconfig)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._kubeconfig_written()

    def mutations(self, since: int = 0) -> list[Request]:
        """The mutating requests, starting with that number of all requests."""
        return [each for each in self.requests[since:] if each.mutating]

    def is_quiet(self, for_s: float) -> bool:
        """Whether no mutating request arrives in that time."""
        since = len(self.requests)
        time.sleep(for_s)
        return not self.mutations(since)

    def hold(self, where: str, *, events: bool = False) -> Gate:
        """Hold the next mutating request, or with `events` the next event. `where` is `before` or
        `after` it reaches the API server."""
        assert where in ("before", "after"), where
        self._gate = Gate(where, events)
        return self._gate

    @property
    def is_holding(self) -> bool:
        """Whether a request is held."""
        return self._gate is not None and self._gate.reached.is_set()

    def release(self) -> None:
        """Stop holding requests; the held request is never answered."""
        self._gate = None

    def drop_watches(self) -> int:
        """Close every watch; return their number."""
        dropped: int = self._call(self._drop_watches())
        return dropped

    def refuse(self) -> None:
        """Stop listening, and close open connections."""
        self._call(self._drop_watches())
        self._call(self._runner.cleanup())

    def accept(self) -> None:
        """Listen again."""
        self._call(self._listen())

    async def _drop_watches(self) -> int:
        watches = list(self._watches.values())
        for each in watches:
            if each.transport is not None:
                each.transport.abort()
        return len(watches)

    async def _open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, skip_auto_headers=("Content-Type", "User-Agent")
        )
        await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 25)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        # A closed or broken connection releases its socket in the loop's next rounds. If the loop
        # ends before, the garbage collector complains, in whichever test is running.
        await asyncio.sleep(0.25)

    async def _handle(self, asked: web.Request) -> web.StreamResponse:
        request = Request(
            asked.method,
            asked.path,
            dry_run="dryRun" in asked.query,
            watch=asked.query.get("watch", "") in ("true", "1"),
        )
        self.requests.append(request)
        await asyncio.sleep(self.delay_s)
        answer = self.answer
        if answer is not None and answer.matches(request):
            request.code = answer.code
            return _status(answer)
        gate = self._gate
        if gate is not None and not gate.takes(request):
            gate = None
        if gate is not None and gate.where == "before":
            await self._held(gate, request)
        return await self._passed_on(asked, request, gate)

    async def _held(self, gate: Gate, request: Request) -> None:
        """Wait until the connection breaks because the caller was killed; then the call is
        cancelled."""
        if gate.request is None:
            gate.request = request
        gate.reached.set()
        await asyncio.Event().wait()

    async def _passed_on(
        self, asked: web.Request, request: Request, gate: Gate | None
    ) -> web.StreamResponse:
        headers = {k: v for k, v in asked.headers.items() if k.lower() not in _HOP}
        headers |= self._authorization
        url = f"{self._server}{asked.raw_path}"
        async with self._session.request(
            asked.method, url, headers=headers, data=await asked.read() or None
        ) as got:
            request.code = got.status
            back = {k: v for k, v in got.headers.items() if k.lower() not in _NOT_PASSED_BACK}
            back["Date"] = _later(got.headers["Date"], self.clock_ahead_s)
            if request.watch and got.status == 200:
                return await self._watched(asked, got, back)
            body = await got.read()
        if gate is not None:
            await self._held(gate, request)
        return web.Response(status=got.status, headers=back, body=body)

    async def _watched(
        self, asked: web.Request, got: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=got.status, headers=headers)
        await response.prepare(asked)
        self._watches[id(asked)] = asked
        try:
            async for chunk in got.content.iter_any():
                if not self.silent:
                    await response.write(chunk)
        finally:
            self._watches.pop(id(asked), None)
        return response

    def _kubeconfig_written(self) -> None:
        """The file holds no credentials: the proxy has them."""
        name = "proxy"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "users": [{"name": name, "user": {"token": "any"}}],
        }
        self.kubeconfig.write_text(json.dumps(document))

    def _call(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(30)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call(self._drop_watches())
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def _later(date: str, seconds: float) -> str:
    """Return that `Date` of a response (RFC 9110) plus `seconds`."""
    return format_datetime(parsedate_to_datetime(date) + timedelta(seconds=seconds), usegmt=True)


def _status(answer: Answer) -> web.Response:
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": answer.code,
        "message": "the fault proxy refuses it",
    }
    return web.json_response(document, status=answer.code, headers=dict(answer.headers))


def _upstream(kubeconfig: Path) -> tuple[str, ssl.SSLContext, dict[str, str]]:
    """Return the API server of the current context, and its credentials: a client certificate, the
    headers of a token, or both.

    Raises: UnavailableError if the file has neither.
    """
    document = yaml.safe_load(kubeconfig.read_text())
    contexts = {each["name"]: each["context"] for each in document["contexts"]}
    context = contexts[document["current-context"]]
    (cluster,) = [c["cluster"] for c in document["clusters"] if c["name"] == context["cluster"]]
    (user,) = [u["user"] for u in document["users"] if u["name"] == context["user"]]
    trust = ssl.create_default_context(cadata=_pem(cluster, "certificate-authority") or None)
    certificate, key = _pem(user, "client-certificate"), _pem(user, "client-key")
    token = user.get("token") or _text(user.get("tokenFile"))
    if certificate and key:
        with tempfile.TemporaryDirectory() as folder:
            both = Path(folder) / "client.pem"
            both.write_text(f"{certificate}\n{key}")
            trust.load_cert_chain(both)
    elif not token:
        raise UnavailableError(
            f"user {context['user']!r} of {kubeconfig} has neither a client certificate nor a token"
            f" (it has: {', '.join(sorted(user)) or 'nothing'}). Name a context whose user has one"
        )
    authorization = {"Authorization": f"Bearer {token.strip()}"} if token else {}
    return str(cluster["server"]).rstrip("/"), trust, authorization


def _pem(entry: dict[str, Any], key: str) -> str:
    """Return the PEM data or file under that name; empty if absent."""
    if f"{key}-data" in entry:
        return base64.b64decode(entry[f"{key}-data"]).decode()
    return _text(entry.get(key))


def _text(path: str | None) -> str:
    return Path(path).read_text() if path else ""


def waited(look: Callable[[], bool], within_s: float, *, every_s: float = 0.2) -> bool:
    """Whether `look` became true in that time."""
    deadline_s = time.monotonic() + within_s
    while not look():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return True

"""A proxy before an API server that records every request and, on command, misbehaves.

Plain HTTP on a free port of 127.0.0.1, with a kubeconfig of its own; it asks the real API server
with the credentials of the kubeconfig that it was given. It runs in a thread, so that a test
may stand still. It knows nothing of what passes through.
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
    """One request, as it was asked and answered; code 0: not answered (yet)."""

    method: str
    path: str
    dry_run: bool
    watch: bool
    code: int = 0
    at_s: float = field(default_factory=time.monotonic)
    """When it came."""

    @property
    def mutating(self) -> bool:
        """Whether it is there to change something; events apart, which are only told."""
        return self.writing and "/events" not in self.path

    @property
    def writing(self) -> bool:
        """Whether the API server is to keep something of it, be it an event; not that an operator
        goes on, which it tells every few seconds."""
        is_write = self.method in ("POST", "PUT", "PATCH", "DELETE") and not self.dry_run
        return is_write and "/leases" not in self.path

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Gate:
    """Holds the first mutating request that comes: before it goes on, or before its answer does."""

    where: str
    events: bool = False
    """Whether it holds the first that tells of an event, and nothing else."""
    reached: threading.Event = field(default_factory=threading.Event)
    request: Request | None = None

    def takes(self, request: Request) -> bool:
        """Whether this is one that it holds."""
        return request.writing and request.mutating != self.events


@dataclass(frozen=True)
class Answer:
    """What the proxy answers in the API server's place to requests that match."""

    code: int
    matches: Callable[[Request], bool]
    headers: tuple[tuple[str, str], ...] = ()


class FaultProxy:
    """The proxy; a context that serves it. Attributes may be set from the test's thread."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.requests: list[Request] = []
        self.answer: Answer | None = None
        """Answered instead of the API server; None: nothing is."""
        self.delay_s = 0.0
        """How late every answer is."""
        self.silent = False
        """Whether watches bring nothing more; what comes meanwhile is lost."""
        self.clock_ahead_s = 0.0
        """By how much later than the API server's own the time is that its answers bear."""
        self.kubeconfig = folder / "through-the-proxy.yaml"
        self._gate: Gate | None = None
        self._watches: dict[int, web.Request] = {}
        self._port = free_ports(1)[0]
        self._server, self._ssl, self._authorization = _upstream(kubeconfig)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._kubeconfig_written()

    def mutations(self, since: int = 0) -> list[Request]:
        """The mutating requests from that number of all requests on."""
        return [each for each in self.requests[since:] if each.mutating]

    def is_quiet(self, for_s: float) -> bool:
        """Whether no mutating request comes for so long."""
        since = len(self.requests)
        time.sleep(for_s)
        return not self.mutations(since)

    def hold(self, where: str, *, events: bool = False) -> Gate:
        """Holds the next mutating request, or with `events` the next that tells of one, `before` it
        reaches the API server or `after` that."""
        assert where in ("before", "after"), where
        self._gate = Gate(where, events)
        return self._gate

    @property
    def is_holding(self) -> bool:
        """Whether a request has come to the gate."""
        return self._gate is not None and self._gate.reached.is_set()

    def release(self) -> None:
        """Holds nothing any more; what was held is never answered."""
        self._gate = None

    def drop_watches(self) -> int:
        """Breaks every watch off; how many there were."""
        dropped: int = self._call(self._drop_watches())
        return dropped

    def refuse(self) -> None:
        """Nobody listens any more, and open connections break."""
        self._call(self._drop_watches())
        self._call(self._runner.cleanup())

    def accept(self) -> None:
        """Listens again."""
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
        # What was closed or broken off lets go of its socket in the loop's next rounds. Where it
        # ends before, the garbage collector complains, in whichever test it runs.
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
        """Until the connection breaks, since who asked was killed; then it is cancelled."""
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
        """No credentials: the proxy has them."""
        name = "proxy"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "users": [{"name": name, "user": {"token": "anybody"}}],
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
    """That `Date` of a response (RFC 9110) so much later."""
    return format_datetime(parsedate_to_datetime(date) + timedelta(seconds=seconds), usegmt=True)


def _status(answer: Answer) -> web.Response:
    document = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": answer.code,
        "message": "the fault proxy says so",
    }
    return web.json_response(document, status=answer.code, headers=dict(answer.headers))


def _upstream(kubeconfig: Path) -> tuple[str, ssl.SSLContext, dict[str, str]]:
    """The API server of the current context, and how it is asked: by a client's certificate, by the
    headers of a token, or by both.

    Raises: UnavailableError where the file has neither.
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
    """What is there under that name, itself or in a file; empty: nothing."""
    if f"{key}-data" in entry:
        return base64.b64decode(entry[f"{key}-data"]).decode()
    return _text(entry.get(key))


def _text(path: str | None) -> str:
    return Path(path).read_text() if path else ""


def waited(look: Callable[[], bool], within_s: float, *, every_s: float = 0.2) -> bool:
    """Whether it came true in that time."""
    deadline_s = time.monotonic() + within_s
    while not look():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(every_s)
    return True

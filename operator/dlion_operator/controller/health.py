"""Serve /livez, /readyz, /metrics and /bandwidth over HTTP.

Unhealthy means that a restart may help: the event loop is blocked, or the watches miss changes. An
unreachable API server does not make it unhealthy: workers continue training, and the operator
retries.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dlion_api.errors import DLionError
from dlion_api.names import SiteName
from dlion_operator.controller.metrics import OperatorMetrics
from dlion_operator.federation.link_bandwidth import LinkBandwidth
from dlion_operator.kubernetes.resync import Resync

TICK_S = 1.0
MAX_LOOP_LAG_S = 30.0
MAX_STALE_ROUNDS = 2

MAX_CONNECTIONS = 128
"""For each of the two ports. The oldest is closed for a further one."""
SILENCE_S = 75.0
"""A connection that asks for nothing for this long is closed. Scrapers ask once a minute or more
often."""
MAX_HEADER_BYTES = 4096
"""aiohttp keeps at most 128 such fields of a request."""

_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class HealthMonitor:
    """The health of this process."""

    def __init__(self, metrics: OperatorMetrics, resync: Resync) -> None:
        self._metrics = metrics
        self._resync = resync
        self._ticked_s = time.monotonic()
        self.ready = False
        """Whether the operator serves workers and knows every job."""

    async def tick(self) -> None:
        """Measure the lag of the event loop, without end."""
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._metrics.loop_lag_seconds.set(max(0.0, now_s - self._ticked_s - TICK_S))
            self._ticked_s = now_s

    def unhealthy_reason(self) -> str:
        """Why a restart would help. Empty: healthy."""
        if time.monotonic() - self._ticked_s > MAX_LOOP_LAG_S:
            return f"the event loop has been blocked for more than {MAX_LOOP_LAG_S:g} s"
        if (rounds := self._resync.stale_rounds) >= MAX_STALE_ROUNDS:
            return f"watches missed changes in {rounds} rounds in a row"
        if self._resync.has_version_decreased:
            return "resource versions of the API server went back: watches must be restarted"
        if self._resync.has_unwatched_kind:
            return "Kueue was installed or upgraded after the start: Workloads are not watched yet"
        return ""


async def serve_health(health: HealthMonitor, port: int) -> web.ServerRunner:
    """Serve /livez and /readyz. Raises: OSError if the port is in use."""

    async def livez(_: web.BaseRequest) -> web.Response:
        unhealthy_reason = health.unhealthy_reason()
        return web.Response(
            text=f"{unhealthy_reason or 'ok'}\n", status=503 if unhealthy_reason else 200
        )

    async def readyz(_: web.BaseRequest) -> web.Response:
        text = "ok" if health.ready else "not all jobs are known yet"
        return web.Response(text=f"{text}\n", status=200 if health.ready else 503)

    return await _serve({"/livez": livez, "/readyz": readyz}, port)


Measure = Callable[[SiteName], Awaitable[LinkBandwidth]]
"""Measures the link to that site.

Raises: LookupError if the site is unknown, DLionError.
"""


async def serve_metrics(
    registry: CollectorRegistry, port: int, measure: Measure | None = None
) -> web.ServerRunner:
    """Serve /metrics and, with `measure`, /bandwidth/SITE, which measures the link to that site.

    Any caller may request a measurement, so a site must allow it. Raises: OSError if the port is in
    use.
    """

    async def metrics(_: web.BaseRequest) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def bandwidth(request: web.BaseRequest) -> web.Response:
        site = SiteName(request.path.rpartition("/")[2])
        if measure is None:
            message = "links are not measured (federation.measureOnDemand), or no other site exists"
            return web.json_response({"message": message}, status=404)
        try:
            measured = await measure(site)
        except LookupError:
            message = f"site {site!r:.80} is not among the sites of this operator"
            return web.json_response({"message": message}, status=404)
        except DLionError as error:
            return web.json_response({"message": str(error)}, status=503)
        return web.json_response(
            {
                "site": site,
                "bytes": measured.bytes_count,
                "seconds": measured.seconds,
                "bytesPerSecond": measured.bytes_per_s,
            }
        )

    return await _serve({"/metrics": metrics, "/bandwidth/": bandwidth}, port)


class _BoundedServer(web.Server):
    """Closes its oldest connection for each one over the limit, so that a new caller is served."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        open_ones = self.connections  # the oldest first
        # Those that are closing already are among them.
        for oldest in open_ones[: max(0, len(open_ones) - MAX_CONNECTIONS)]:
            oldest.force_close()


async def _serve(handlers: dict[str, _Handler], port: int) -> web.ServerRunner:
    """Serve each handler at its path, or at the paths below it if it ends in a slash."""

    async def handle(request: web.BaseRequest) -> web.Response:
        handler = handlers.get(request.path, handlers.get(request.path.rpartition("/")[0] + "/"))
        if handler is None:
            raise web.HTTPNotFound
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        return await handler(request)

    server = _BoundedServer(
        handle, access_log=None, keepalive_timeout=SILENCE_S, max_field_size=MAX_HEADER_BYTES
    )
    runner = web.ServerRunner(server)
    await runner.setup()
    # The loop accepts this many at once, before it reads their requests.
    await web.TCPSite(runner, None, port, backlog=MAX_CONNECTIONS // 2).start()
    return runner

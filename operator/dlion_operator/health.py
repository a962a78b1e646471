"""/livez, /readyz, /metrics and /bandwidth over HTTP.

Alive: the event loop turns, and the watches bring what lists show. A restart mends either. An API
server that does not answer is no reason for one: workers train on, and it is asked again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from dlion_api.errors import DLionError
from dlion_api.names import SiteName
from dlion_operator.federation.measuring import Bandwidth
from dlion_operator.metrics import OperatorMetrics

TICK_S = 1.0
MOST_LAG_S = 30.0
MOST_STALE_ROUNDS = 2


class Health:
    """What is said of this process's health."""

    def __init__(
        self,
        metrics: OperatorMetrics,
        stale_rounds: Callable[[], int],
        has_gone_back: Callable[[], bool] = lambda: False,
    ) -> None:
        """`has_gone_back`: whether resource versions have since this process began (`resync`)."""
        self._metrics = metrics
        self._stale_rounds = stale_rounds
        self._has_gone_back = has_gone_back
        self._ticked_s = time.monotonic()
        self.ready = False
        """Whether the operator serves workers and has seen every job."""

    async def tick(self) -> None:
        """Notes, again and again, how late the loop is."""
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._metrics.loop_lag_seconds.set(max(0.0, now_s - self._ticked_s - TICK_S))
            self._ticked_s = now_s

    def illness(self) -> str:
        """Why a restart would help; empty: it would not."""
        if time.monotonic() - self._ticked_s > MOST_LAG_S:
            return f"the event loop has stood still for more than {MOST_LAG_S:g} s"
        if self._stale_rounds() >= MOST_STALE_ROUNDS:
            return f"watches missed changes in {self._stale_rounds()} rounds in a row"
        if self._has_gone_back():
            return "resource versions of the API server went back: watches have to begin anew"
        return ""


async def serve_health(health: Health, port: int) -> web.AppRunner:
    """Serves /livez and /readyz. Raises: OSError where the port is taken."""

    async def livez(_: web.Request) -> web.Response:
        illness = health.illness()
        return web.Response(text=f"{illness or 'ok'}\n", status=503 if illness else 200)

    async def readyz(_: web.Request) -> web.Response:
        words = "ok" if health.ready else "not every job has been seen yet"
        return web.Response(text=f"{words}\n", status=200 if health.ready else 503)

    return await _serve({"/livez": livez, "/readyz": readyz}, port)


Measure = Callable[[SiteName], Awaitable[Bandwidth]]
"""Measures the link to that site. Raises: LookupError where no such site is known, DLionError."""


async def serve_metrics(
    registry: CollectorRegistry, port: int, measure: Measure | None = None
) -> web.AppRunner:
    """Serves /metrics and, with `measure`, /bandwidth/SITE, which measures the link to that site
    for anybody who asks: a site has to allow it. Raises: OSError where the port is taken."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def bandwidth(request: web.Request) -> web.Response:
        site = SiteName(request.match_info["site"])
        if measure is None:
            words = "links are not measured here (federation.measureOnDemand), or there is no other"
            return web.json_response({"message": words}, status=404)
        try:
            found = await measure(site)
        except LookupError:
            words = f"site {site!r:.80} is not among the sites of this operator"
            return web.json_response({"message": words}, status=404)
        except DLionError as error:
            return web.json_response({"message": str(error)}, status=503)
        told = {"bytes": found.bytes_count, "seconds": found.seconds}
        return web.json_response({"site": site, **told, "bytesPerSecond": found.bytes_per_s})

    return await _serve({"/metrics": metrics, "/bandwidth/{site}": bandwidth}, port)


async def _serve(handlers: dict[str, Callable[[web.Request], object]], port: int) -> web.AppRunner:
    app = web.Application()
    for path, handler in handlers.items():
        app.router.add_get(path, handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner

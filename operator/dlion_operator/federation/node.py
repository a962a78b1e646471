"""This site's part in the federation, put together: one port, one stream to each other site, the
bundles that change. Runs in the operator's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from dlion_api.names import JobKey, SiteName
from dlion_operator.authority import Authority
from dlion_operator.federation.bundles import Bundles
from dlion_operator.federation.credentials import Credentials
from dlion_operator.federation.dialling import Dialler
from dlion_operator.federation.measuring import Bandwidth, Meter
from dlion_operator.federation.reports import RunReport
from dlion_operator.federation.service import FederationService
from dlion_operator.federation.state import SILENT_AFTER_S, Federation, Hearing
from dlion_operator.settings import RemoteSite

_LOG = logging.getLogger(__name__)

BUNDLES_EVERY_S = 3.0
LOOK_EVERY_S = 0.5
"""So soon is told what is new."""

Reports = Callable[[], Mapping[JobKey, RunReport]]


class FederationNode:
    """What other sites hear of this one, and what this one hears of them."""

    def __init__(
        self,
        authority: Authority,
        sites: tuple[RemoteSite, ...],
        *,
        certificate_life: timedelta,
        reports: Reports,
        on_news: Callable[[JobKey], None],
        on_bundles: Callable[[Mapping[SiteName, bytes]], None],
    ) -> None:
        """`reports` is what to say, asked for again and again; `on_news` hears which run other
        sites say something new of, `on_bundles` all bundles whenever one is another."""
        own = authority.site
        self._ask = reports
        self._current: Mapping[JobKey, RunReport] = {}
        """One for all streams."""
        self._state = Federation(own, [SiteName(site.name) for site in sites])
        self._bundles = Bundles({SiteName(site.name): Path(site.bundle_file) for site in sites})
        self._on_bundles = on_bundles
        self.credentials = Credentials(authority, certificate_life)
        self.service = FederationService(own, self._state, self.credentials, on_news)
        self.diallers = {
            SiteName(site.name): Dialler(
                own, SiteName(site.name), site.address, self.credentials, lambda: self._current
            )
            for site in sites
        }
        addresses = {SiteName(site.name): site.address for site in sites}
        self._meter = Meter(own, addresses, self.credentials)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, listen_address: str) -> int:
        """Opens the port, yields its number, and begins to dial.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        self._reload()
        port = await self.service.start(listen_address)
        self._current = self._ask()
        running = [dialler.run() for dialler in self.diallers.values()]
        running += [self._look(), self._keep_current()]
        self._tasks = [asyncio.create_task(each) for each in running]
        for task in self._tasks:
            task.add_done_callback(_report_defect)
        return port

    async def close(self) -> None:
        """Ends all streams and the port."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.service.shut_down()

    def replace_authority(self, authority: Authority) -> None:
        """This operator's certificates are signed by that one from now on."""
        self.credentials.replace_authority(authority)

    def reports(self, run: JobKey) -> Mapping[SiteName, RunReport]:
        """What each site that has that run said of it last."""
        return self._state.reports(run)

    def hearing(self, site: SiteName) -> Hearing:
        """Whether that site is heard just now."""
        return self._state.hearing(site, time.monotonic())

    def problem(self, site: SiteName) -> str:
        """What stands between this site and that one, for people; empty: nothing."""
        if site not in self.diallers:
            return "not among this site's sites (values: sites)"
        if said := self._bundles.problems.get(site):
            return said
        if said := self.diallers[site].problem:
            return said
        heard = self.hearing(site)
        if heard.heartbeat_age_s is None:
            return "its operator has said nothing yet"
        if not heard.reachable:
            return f"nothing of its operator for more than {SILENT_AFTER_S:g} s"
        return ""

    async def bandwidth(self, site: SiteName) -> Bandwidth:
        """What the link to that site carries, measured now. Raises: as `Meter.bandwidth`."""
        return await self._meter.bandwidth(site)

    def has_bundle(self, site: SiteName) -> bool:
        """Whether that site is believed: by its bundle as it is, or as it was before."""
        return site in self._bundles.pems

    def bundle_will_do(self, site: SiteName) -> bool:
        """Whether that site's file is as it should be: after a restart nothing else is believed."""
        return site in self._bundles.pems and site not in self._bundles.problems

    def _reload(self) -> None:
        if not self._bundles.reload():
            return
        for site, problem in self._bundles.problems.items():
            words = "site %s: %s" if self.has_bundle(site) else "site %s is not trusted: %s"
            _LOG.error(words, site, problem)
        self.credentials.trust(self._bundles.pems)
        self._on_bundles(self._bundles.pems)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                self._current = self._ask()
            except Exception:  # noqa: BLE001 - one run's defect must not silence this site
                _LOG.exception("other sites are told of no change; tried again")

    async def _keep_current(self) -> None:
        while True:
            await asyncio.sleep(BUNDLES_EVERY_S)
            try:
                self._reload()
                self.credentials.renew()
            except Exception:  # noqa: BLE001 - without its rounds trust would run out
                _LOG.exception("bundles and certificate stay as they are; tried again")


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("federation: a defect of ours", exc_info=error)

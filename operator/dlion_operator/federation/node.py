"""This site's node in the federation: one port, one stream to each other site, trusted bundles."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

from dlion_api.names import JobKey, SiteName
from dlion_operator.federation.bundles import Bundles
from dlion_operator.federation.client import FederationClient
from dlion_operator.federation.credentials import Credentials
from dlion_operator.federation.link_bandwidth import BandwidthMeter
from dlion_operator.federation.reports import RunReport
from dlion_operator.federation.service import FederationService
from dlion_operator.federation.state import SILENT_AFTER_S, FederationState, SiteReachability
from dlion_operator.model.settings import RemoteSite
from dlion_operator.pki.authority import CertificateAuthority

_LOG = logging.getLogger(__name__)

BUNDLES_INTERVAL_S = 3.0
REPORTS_INTERVAL_S = 0.5
"""How often the reports are read again; bounds the delay of a change."""

Reports = Callable[[], Mapping[JobKey, RunReport]]


class FederationNode:
    """Sends this site's reports to the other sites and receives theirs."""

    def __init__(
        self,
        authority: CertificateAuthority,
        sites: tuple[RemoteSite, ...],
        *,
        certificate_life: timedelta,
        reports: Reports,
        on_run_changed: Callable[[JobKey], None],
        on_bundles: Callable[[Mapping[SiteName, bytes]], None],
    ) -> None:
        """`reports` returns the current reports and is called repeatedly.

        `on_run_changed` receives each run that another site reports changes of. `on_bundles`
        receives all bundles whenever one changes.
        """
        own = authority.site
        self._read_reports = reports
        self._current: Mapping[JobKey, RunReport] = {}
        """Shared by all streams."""
        self._state = FederationState(own, [SiteName(site.name) for site in sites])
        self._bundles = Bundles({SiteName(site.name): Path(site.bundle_file) for site in sites})
        self._on_bundles = on_bundles
        self.credentials = Credentials(authority, certificate_life)
        self.service = FederationService(own, self._state, self.credentials, on_run_changed)
        self.clients = {
            SiteName(site.name): FederationClient(
                own, SiteName(site.name), site.address, self.credentials, lambda: self._current
            )
            for site in sites
        }
        addresses = {SiteName(site.name): site.address for site in sites}
        self.meter = BandwidthMeter(own, addresses, self.credentials)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, listen_address: str) -> int:
        """Open the port, start the clients and return the port's number.

        Raises: UnavailableError if the server cannot listen on the address.
        """
        self._reload()
        port = await self.service.start(listen_address)
        self._current = self._read_reports()
        running = [client.run() for client in self.clients.values()]
        running += [self._refresh_reports(), self._refresh_trust()]
        self._tasks = [asyncio.create_task(each) for each in running]
        for task in self._tasks:
            task.add_done_callback(_log_task_error)
        return port

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.service.shut_down()

    def reports(self, run: JobKey) -> Mapping[SiteName, RunReport]:
        return self._state.reports(run)

    def reachability(self, site: SiteName) -> SiteReachability:
        return self._state.reachability(site, time.monotonic())

    def problem(self, site: SiteName) -> str:
        """Return a message about what is wrong with the link to that site; empty: nothing."""
        if site not in self.clients:
            return "not among this site's sites (values: sites)"
        if problem := self._bundles.problems.get(site) or self.clients[site].problem:
            return problem
        reachability = self.reachability(site)
        if reachability.heartbeat_age_s is None:
            return "its operator has reported nothing yet"
        if not reachability.reachable:
            return f"no message from its operator for more than {SILENT_AFTER_S:g} s"
        return ""

    def has_bundle(self, site: SiteName) -> bool:
        """Whether that site is trusted, by its current or its last valid bundle."""
        return site in self._bundles.pems

    def is_bundle_valid(self, site: SiteName) -> bool:
        """Whether that site's file is valid now, which it must be at the operator's next start."""
        return site in self._bundles.pems and site not in self._bundles.problems

    def _reload(self) -> None:
        if not self._bundles.reload():
            return
        for site, problem in self._bundles.problems.items():
            text = "site %s: %s" if self.has_bundle(site) else "site %s is not trusted: %s"
            _LOG.error(text, site, problem)
        self.credentials.trust(self._bundles.pems)
        self._on_bundles(self._bundles.pems)

    async def _refresh_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORTS_INTERVAL_S)
            try:
                self._current = self._read_reports()
            except Exception:  # noqa: BLE001 - a bug in one run must not stop this loop
                _LOG.exception("no changes are reported to other sites; retrying")

    async def _refresh_trust(self) -> None:
        while True:
            await asyncio.sleep(BUNDLES_INTERVAL_S)
            try:
                self._reload()
                self.credentials.renew()
            except Exception:  # noqa: BLE001 - if this loop ended, certificates would expire
                _LOG.exception("bundles and certificate were not refreshed; retrying")


def _log_task_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOG.error("federation: a bug in DLion ended a task", exc_info=error)

"""Loss and round trips of the connections to each site, from the kernel's list of connections.

Measures only: no decision depends on it.
"""

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dlion_api.addresses import split_host_port
from dlion_api.names import SiteName
from dlion_worker.host_names import HostNames
from dlion_worker.tcp_connections import Endpoint, TcpConnection, tcp_connections

_COUNTS: Final = 1 << 32
"""The kernel's counts start again from 0 there."""


@dataclass(frozen=True)
class SiteConnections:
    """The connections to the workers of one site. Counts never shrink."""

    sent_segments: int = 0
    retransmitted_segments: int = 0
    round_trip_s: float | None = None
    """The longest one; None while there is no connection."""
    min_round_trip_s: float | None = None


@dataclass
class LinkConnections:
    """Sums up the connections of a worker's links by the site that they lead to. Thread-safe."""

    _reached: Collection[tuple[str, int, SiteName]] = ()
    """Host, port and site of each peer's worker."""
    _names: HostNames = field(default_factory=HostNames)
    _counted: Mapping[int, TcpConnection] = field(default_factory=dict)
    """Up to where each connection has been counted, by cookie."""
    _by_site: Mapping[SiteName, SiteConnections] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """From the reading on: an older sample added after a newer one would look like a new start."""

    def set_addresses(self, addresses: Iterable[tuple[str, SiteName]]) -> None:
        """Set where the peers' workers are reached. One that several sites share has the figures of
        none of them."""
        split = ((*split_host_port(address), site) for address, site in addresses)
        self._reached = [
            (host, int(port), site) for host, port, site in split if host and port.isdecimal()
        ]

    def sample(self) -> Mapping[SiteName, SiteConnections]:
        """Read the kernel's counters; without sock_diag nothing is known.

        The kernel knows no host names: they count from the first sample after they were found.
        """
        self._names.look_up({host for host, _, _ in self._reached})
        with self._lock:
            try:
                return self.add(tcp_connections())
            except OSError:
                return {}

    def add(self, connections: Iterable[TcpConnection]) -> Mapping[SiteName, SiteConnections]:
        """Add what these connections have sent since the last sample."""
        with self._lock:
            totals = {
                site: replace(known, round_trip_s=None, min_round_trip_s=None)
                for site, known in self._by_site.items()
            }
            counted, sites = dict[int, TcpConnection](), self._sites()
            for each in connections:
                before = self._counted.get(each.cookie)
                if (site := sites.get(each.remote)) is not None:
                    totals[site] = _sum(totals.get(site, SiteConnections()), each, before)
                    counted[each.cookie] = each
                elif before is not None:  # its peer is away, and may return
                    counted[each.cookie] = before
            self._by_site, self._counted = totals, counted
            return totals

    def _sites(self) -> Mapping[Endpoint, SiteName]:
        sites: dict[Endpoint, set[SiteName]] = {}
        for host, port, site in self._reached:
            for address in self._names.addresses(host):
                sites.setdefault((address, port), set()).add(site)
        return {endpoint: of.pop() for endpoint, of in sites.items() if len(of) == 1}


def _sum(
    site: SiteConnections, now: TcpConnection, before: TcpConnection | None
) -> SiteConnections:
    sent, again = now.sent_segments, now.retransmitted_segments
    if before is not None:
        sent, again = sent - before.sent_segments, again - before.retransmitted_segments
    both = [each for each in (site.min_round_trip_s, now.min_round_trip_s) if each is not None]
    return SiteConnections(
        site.sent_segments + sent % _COUNTS,
        site.retransmitted_segments + again % _COUNTS,
        max(site.round_trip_s or 0.0, now.round_trip_s),
        min(both, default=None),
    )

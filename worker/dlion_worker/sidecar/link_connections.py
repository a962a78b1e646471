"""Loss and round trips of the connections to each site, from the kernel's list of connections.

Measures only: no decision depends on it.
"""

import ipaddress
import math
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from dlion_api.addresses import split_host_port
from dlion_api.names import SiteName
from dlion_worker.tcp_connections import (
    Address,
    Endpoint,
    TcpConnection,
    address_of,
    plain,
    tcp_connections,
)

LOOK_UP_EVERY_S: Final = 60.0
"""Shortest time between look-ups of one host name. Its addresses may change, which a new connection
follows."""
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


class _KnownName(NamedTuple):
    addresses: frozenset[Address] = frozenset()
    looked_up_s: float = -math.inf
    """When it was looked up last, whether or not it was found."""


class HostNames:
    """The addresses of host names, as the system's resolver has them. Thread-safe.

    A thread looks them up: a resolver may take many seconds, and nothing waits for it, not even the
    end of the process. It asks for one name after another, so many names that no server answers
    take minutes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, _KnownName] = {}
        self._is_busy = False

    def addresses(self, name: str) -> frozenset[Address]:
        """The addresses found so far."""
        return self._known.get(name, _KnownName()).addresses

    def look_up(self, names: Collection[str]) -> None:
        """Forget all other names, and begin to look up those that are due, unless an earlier call
        still does that."""
        now_s = time.monotonic()
        with self._lock:
            self._known = {name: self._known.get(name, _KnownName()) for name in names}
            if self._is_busy:
                return
            before_s = now_s - LOOK_UP_EVERY_S
            due = [name for name, known in self._known.items() if known.looked_up_s <= before_s]
            self._is_busy = bool(due)
        if not due:
            return
        thread = threading.Thread(target=self._find, args=(due,), name="names", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads are allowed now: the next call tries again
            self._is_busy = False

    def _find(self, names: Collection[str]) -> None:
        try:
            for name in names:
                self._take(name, _resolve(name))
        finally:
            self._is_busy = False

    def _take(self, name: str, found: frozenset[Address] | None) -> None:
        with self._lock:
            if (before := self._known.get(name)) is not None:  # else it was forgotten meanwhile
                addresses = before.addresses if found is None else found
                self._known[name] = _KnownName(addresses, time.monotonic())


def _resolve(name: str) -> frozenset[Address] | None:
    """None: unknown, or no name."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return frozenset(plain(ipaddress.ip_address(each[4][0])) for each in answers)
    except (OSError, ValueError):
        return None


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
        hosts = {host for host, _, _ in self._reached}
        self._names.look_up([host for host in hosts if address_of(host) is None])
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
            own = address_of(host)
            for address in self._names.addresses(host) if own is None else (own,):
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

"""Loss and round trips of the connections to each site, from the kernel.

gRPC hides its sockets. The kernel lists those of this network namespace through `sock_diag`, each
with its `tcp_info`; no privilege is needed. All containers of a pod share the namespace, so the
sidecar sees the trainer's connections. Measures only: no decision depends on it.
"""

import errno
import ipaddress
import math
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from dlion_api.addresses import split_host_port
from dlion_api.names import SiteName

Address = IPv4Address | IPv6Address
Endpoint = tuple[Address, int]
"""Address and port of the other end."""

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY, _ERROR, _DONE = 20, 2, 3
_REQUEST_DUMP: Final = 0x301
_INFO: Final = 2
_ESTABLISHED: Final = 1

_HEADER: Final = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence number, port."""
_REQUEST: Final = struct.Struct("=BBBxI48x")
"""inet_diag_req_v2: family, protocol, wanted attributes, states, any socket."""
_SOCKET: Final = struct.Struct("=B5xH16x16s4xQ20x")
"""inet_diag_msg: family, port (big endian) and address of the other end, cookie."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_ERROR_CODE: Final = struct.Struct("=i")
_ROUND_TRIP_AT, _RETRANSMITTED_AT, _MIN_ROUND_TRIP_AT, _SENT_AT = 68, 100, 148, 156
"""Offsets in tcp_info of tcpi_rtt, tcpi_total_retrans, tcpi_min_rtt and tcpi_data_segs_out."""
_NEVER: Final = 0xFFFFFFFF
"""tcpi_min_rtt before the first acknowledgement."""

_COUNTS: Final = 1 << 32
"""The kernel's counts start again from 0 there."""

LOOK_UP_EVERY_S: Final = 60.0
"""Shortest time between look-ups of one host name. Its addresses may change, which a new connection
follows."""
_WITHIN_S: Final = 2.0
_BUFFER_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class TcpConnection:
    """An established connection of this network namespace. Counts are since its beginning."""

    cookie: int
    """Its number, which no other one has."""
    remote: Endpoint
    sent_segments: int
    """Segments with data, repeated ones included."""
    retransmitted_segments: int
    round_trip_s: float
    """Smoothed: it includes the time in queues."""
    min_round_trip_s: float | None
    """The least of the last five minutes; None before the first acknowledgement."""


@dataclass(frozen=True)
class SiteConnections:
    """The connections to the workers of one site. Counts never shrink."""

    sent_segments: int = 0
    retransmitted_segments: int = 0
    round_trip_s: float | None = None
    """The longest one; None while there is no connection."""
    min_round_trip_s: float | None = None


class HostNames:
    """The addresses of host names, as the system's resolver has them. Thread-safe.

    A thread looks them up: a resolver may take many seconds, and nothing waits for it, not even the
    end of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: Mapping[str, frozenset[Address]] = {}
        self._looked_up_s: Mapping[str, float] = {}
        """When each name was looked up last, whether or not it was found."""
        self._is_busy = False

    def addresses(self, name: str) -> frozenset[Address]:
        """The addresses found so far."""
        return self._known.get(name, frozenset())

    def look_up(self, names: Collection[str]) -> None:
        """Begin to look up those of the names that are due, and forget all others."""
        now_s = time.monotonic()
        with self._lock:
            if self._is_busy:
                return
            earlier_s = {name: self._looked_up_s.get(name, -math.inf) for name in names}
            due = [name for name, at_s in earlier_s.items() if now_s - at_s >= LOOK_UP_EVERY_S]
            self._looked_up_s = earlier_s | dict.fromkeys(due, now_s)
            self._known = {name: self.addresses(name) for name in names}
            self._is_busy = bool(due)
        if due:
            threading.Thread(target=self._find, args=(due,), name="names", daemon=True).start()

    def _find(self, names: Collection[str]) -> None:
        found = {}
        for name in names:
            try:
                answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                found[name] = frozenset(
                    _plain(ipaddress.ip_address(each[4][0])) for each in answers
                )
            except (OSError, ValueError):  # unknown, or no name: what was found before stays
                continue
        with self._lock:
            self._known, self._is_busy = {**self._known, **found}, False


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
        self._names.look_up([host for host in hosts if _address(host) is None])
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
            own = _address(host)
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


def _address(host: str) -> Address | None:
    """None: it is a name."""
    try:
        return _plain(ipaddress.ip_address(host))
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """An IPv6 socket that reaches an IPv4 address has it as `::ffff:10.0.0.7`."""
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def tcp_connections() -> list[TcpConnection]:
    """Return the established connections. Raises: OSError if the kernel does not list them."""
    found, errors = list[TcpConnection](), list[OSError]()
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found += _connections_of(family)
        except OSError as error:  # this kernel may lack one of both
            errors.append(error)
    if len(errors) == 2:
        raise errors[0]
    return found


def _connections_of(family: int) -> list[TcpConnection]:
    found: list[TcpConnection] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_WITHIN_S)
        wanted = 1 << (_INFO - 1), 1 << _ESTABLISHED
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, *wanted)
        size = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while _read_messages(kernel.recv(_BUFFER_BYTES), found):
            pass
    return found


def _read_messages(data: bytes, found: list[TcpConnection]) -> bool:
    """Append the connections in what one `recv` returned; return whether more follow.

    Raises: OSError if the kernel reports an error, or if a message is no such message.
    """
    start = 0
    while start + _HEADER.size <= len(data):
        size, kind, *_ = _HEADER.unpack_from(data, start)
        body = data[start + _HEADER.size : start + size]
        if kind == _DONE:
            return False
        if kind == _ERROR and len(body) >= _ERROR_CODE.size:
            raise OSError(-_ERROR_CODE.unpack_from(body)[0], "the kernel lists no connections")
        if kind == _ERROR or size < _HEADER.size:
            raise OSError(errno.EBADMSG, "the kernel's list of connections is not valid")
        if (connection := _connection(body)) is not None:
            found.append(connection)
        start += _aligned(size)
    return True


def _connection(message: bytes) -> TcpConnection | None:
    """None without a `tcp_info` that has all fields: before Linux 4.6."""
    if len(message) < _SOCKET.size:
        return None
    family, port, address, cookie = _SOCKET.unpack_from(message)
    info = next((body for kind, body in _attributes(message) if kind == _INFO), b"")
    if len(info) < _SENT_AT + 4:
        return None
    round_trip, again, least, sent = (
        int(struct.unpack_from("=I", info, offset)[0])
        for offset in (_ROUND_TRIP_AT, _RETRANSMITTED_AT, _MIN_ROUND_TRIP_AT, _SENT_AT)
    )
    remote = ipaddress.ip_address(address[:4] if family == socket.AF_INET else address)
    return TcpConnection(
        cookie,
        (_plain(remote), socket.ntohs(port)),
        sent,
        again,
        round_trip / 1e6,
        None if least == _NEVER else least / 1e6,
    )


def _attributes(message: bytes) -> Iterator[tuple[int, bytes]]:
    start = _SOCKET.size
    while start + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, start)
        yield kind, message[start + _ATTRIBUTE.size : start + size]
        start += max(_aligned(size), _ATTRIBUTE.size)


def _aligned(size: int) -> int:
    return size + 3 & ~3

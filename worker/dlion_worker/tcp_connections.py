"""The TCP connections of this network namespace, with their loss and round trips.

gRPC hides its sockets. The kernel lists them through `sock_diag`, each with its `tcp_info`; no
privilege is needed. All containers of a pod share the namespace, so the sidecar sees the trainer's
connections.
"""

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

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
_SOCKET: Final = struct.Struct("=B5xH16x16s4xQ16xI")
"""inet_diag_msg: family, port (big endian) and address of the other end, cookie, inode."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_ERROR_CODE: Final = struct.Struct("=i")
_ROUND_TRIP_AT, _RETRANSMITTED_AT, _MIN_ROUND_TRIP_AT, _SENT_AT = 68, 100, 148, 156
"""Offsets in tcp_info of tcpi_rtt, tcpi_total_retrans, tcpi_min_rtt and tcpi_data_segs_out."""
_NEVER: Final = 0xFFFFFFFF
"""tcpi_min_rtt before the first acknowledgement."""

_WITHIN_S: Final = 2.0
_BUFFER_BYTES: Final = 1 << 16
_DESCRIPTORS: Final = Path("/proc/self/fd")


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
    inode: int = 0
    """Number of the socket, by which a process finds its own ones."""


def address_of(host: str) -> Address | None:
    """Return the address that a host is given by; None: it is a name."""
    try:
        return plain(ipaddress.ip_address(host))
    except ValueError:
        return None


def plain(address: Address) -> Address:
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


def own_connections() -> list[TcpConnection]:
    """Return the connections of this process. Raises: OSError, also without a `/proc`."""
    own = set()
    for descriptor in _DESCRIPTORS.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            own.add(str(descriptor.readlink()))
    return [each for each in tcp_connections() if f"socket:[{each.inode}]" in own]


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
    family, port, address, cookie, inode = _SOCKET.unpack_from(message)
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
        (plain(remote), socket.ntohs(port)),
        sent,
        again,
        round_trip / 1e6,
        None if least == _NEVER else least / 1e6,
        inode,
    )


def _attributes(message: bytes) -> Iterator[tuple[int, bytes]]:
    start = _SOCKET.size
    while start + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, start)
        yield kind, message[start + _ATTRIBUTE.size : start + size]
        start += max(_aligned(size), _ATTRIBUTE.size)


def _aligned(size: int) -> int:
    return size + 3 & ~3

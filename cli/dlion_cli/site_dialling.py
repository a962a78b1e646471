"""One site's federation port as this machine reaches it: name, port, certificate, clock.

Called by `preflight`. Knows the list's address and public bundle, has no certificate of its own
and sends nothing behind the handshake. What answers may be anything: every wait is bounded.
"""

from __future__ import annotations

import errno
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from dlion_api.addresses import joined
from dlion_api.errors import ContractError
from dlion_api.names import OperatorIdentity, SiteName
from dlion_cli.checks import Check, Outcome
from dlion_cli.failures import message_of
from dlion_cli.presented import (
    NOT_OURS,
    Presented,
    clock,
    read_presented,
    refused_certificate,
    trusted_certificate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlion_cli.listed_sites import TrustedSite

MOST_ADDRESSES: Final = 8
"""Of one name; operators' gRPC tries them one after the other, too."""
_OPEN: Final = "open the port to this machine and to all sites (firewall, federation.service)"

Addresses = list[tuple[Any, ...]]
"""As `socket.getaddrinfo` yields them."""


class _Deadline:
    """What is left of a site's time."""

    def __init__(self, within_s: float) -> None:
        self._end_s = time.monotonic() + within_s

    @property
    def left_s(self) -> float:
        """Never nothing: whatever begins late fails by its own time-out."""
        return max(0.05, self._end_s - time.monotonic())


@dataclass(frozen=True)
class _Connection:
    """One that was taken; nothing more is known of it, it may have been reset since."""

    socket: socket.socket
    where: str
    """The address that took it."""
    took_s: float


def dial_all(sites: Sequence[TrustedSite], within_s: float) -> list[Check]:
    """The checks of all sites, in their order; all are dialled at the same time.

    Each site has `within_s` seconds; one at which something unforeseen happens fails alone.
    Raises: KeyboardInterrupt at once, whatever hangs.
    """
    answers: queue.SimpleQueue[tuple[str, list[Check]]] = queue.SimpleQueue()

    def one(site: TrustedSite) -> None:
        try:
            checks = dialled(site, within_s)
        except Exception as error:  # noqa: BLE001 - what a site answers may be anything
            checks = [Check(site.name, "tls", Outcome.FAIL, message_of(error))]
        answers.put((site.name, checks))

    for site in sites:
        threading.Thread(target=one, args=(site,), daemon=True, name=f"site {site.name}").start()
    found = dict(answers.get() for _ in sites)
    return [check for site in sites for check in found[site.name]]


def dialled(site: TrustedSite, within_s: float) -> list[Check]:
    """What is found on the way to that site's operator, as far as it leads; blocks so long."""
    deadline = _Deadline(within_s)
    host, _, port = site.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        addresses = _resolved(host, int(port), deadline)
    except (OSError, UnicodeError) as error:
        seen = f"{host}: {_words(error)}"
        advice = f"Correct the address of {site.name} in the list, or have the name resolved here"
        return [Check(site.name, "dns", Outcome.FAIL, seen, advice)]
    hosts = list(dict.fromkeys(str(each[4][0]) for each in addresses))
    literal = hosts == [host]
    seen = f"{host} is an address" if literal else f"{host} is {', '.join(hosts)}"
    checks = [Check(site.name, "dns", Outcome.OK, seen)]
    connected = _connect(addresses, deadline)
    if isinstance(connected, str):
        advice = f"Correct the address of {site.name} in the list, or {_OPEN}"
        return [*checks, Check(site.name, "port", Outcome.FAIL, connected, advice)]
    took_s = connected.took_s
    seen = f"connected to {connected.where} in {took_s * 1e3:.1f} ms from this machine"
    checks.append(Check(site.name, "port", Outcome.OK, seen, figures={"connect_s": took_s}))
    return checks + _tls(site, connected.socket, addresses, deadline)


def _resolved(host: str, port: int, deadline: _Deadline) -> Addresses:
    """The first few addresses of that name; the resolver itself knows no time-out.

    Raises: OSError, UnicodeError.
    """
    answers: queue.SimpleQueue[Addresses | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001 - raised below
            answers.put(error)

    threading.Thread(target=ask, daemon=True, name=f"resolving {host}").start()
    try:
        answer = answers.get(timeout=deadline.left_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer[:MOST_ADDRESSES]


def _connect(addresses: Addresses, deadline: _Deadline) -> _Connection | str:
    """A connection to the first that takes one; else why none does."""
    failures: list[str] = []
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(deadline.left_s / (len(addresses) - index))
        where = joined(*address[:2])
        began_s = time.monotonic()
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            failures.append(f"{where}: {_words(error)}")
        else:
            return _Connection(connection, where, time.monotonic() - began_s)
    return "; ".join(failures)


def _tls(
    site: TrustedSite, connection: socket.socket, addresses: Addresses, deadline: _Deadline
) -> list[Check]:
    """Of the handshake on that connection, which is closed."""
    try:
        presented = _handshake(site, connection, deadline, trusting=True)
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
    except (OSError, ContractError) as error:
        return [_no_tls(site, error)]
    else:
        return [trusted_certificate(site, presented), clock(site, presented, datetime.now(UTC))]
    again = _connect(addresses, deadline)
    try:
        if isinstance(again, str):
            raise ConnectionError(again)
        presented = _handshake(site, again.socket, deadline, trusting=False)
    except (OSError, ContractError):
        seen = f"a certificate that its bundle does not vouch for ({why})"
        return [Check(site.name, "tls", Outcome.FAIL, seen, NOT_OURS)]
    return refused_certificate(site, presented, datetime.now(UTC), why)


def _handshake(
    site: TrustedSite, connection: socket.socket, deadline: _Deadline, *, trusting: bool
) -> Presented:
    """What the other end presents; without `trusting` whatever it is, only to be looked at.

    TLS 1.3, as operators have it: there a server shows its certificate before it asks for one.
    Raises: SSLCertVerificationError, OSError, ContractError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    if trusting:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: a bundle may be no root
        context.load_verify_locations(cadata=site.bundle.pem)
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    name = OperatorIdentity(SiteName(site.name)).dns_name
    connection.settimeout(deadline.left_s)  # of the handshake as a whole
    with connection:
        connection.getpeername()  # of one that was reset `wrap_socket` would leave half open
        with context.wrap_socket(connection, server_hostname=name) as secured:
            return read_presented(secured.getpeercert(binary_form=True) or b"")


def _no_tls(site: TrustedSite, error: Exception) -> Check:
    """Of a port that comes to no handshake."""
    if isinstance(error, TimeoutError):
        seen = "it takes the connection and says nothing in time"
    elif isinstance(error, ssl.SSLEOFError | ConnectionError) or _is_unconnected(error):
        seen = "it closes the connection in the handshake"
    elif isinstance(error, ssl.SSLError):
        seen = f"what answers there does not speak TLS 1.3 ({_reason(error)})"
    else:
        seen = str(error)
    return Check(site.name, "tls", Outcome.FAIL, seen, NOT_OURS)


def _is_unconnected(error: Exception) -> bool:
    """Whether the connection was reset before the handshake began."""
    return isinstance(error, OSError) and error.errno == errno.ENOTCONN


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def _words(error: Exception) -> str:
    """An error of the system for people."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, socket.gaierror):
        return "no such host" if error.errno == socket.EAI_NONAME else str(error.strerror)
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "is no name that could be resolved"

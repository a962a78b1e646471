"""Connects to a site's federation port and checks name, port, MTU, certificate and clock.

Uses the listed address and public bundle, and no credentials; sends nothing after the handshake.
Every wait is bounded, because the server is untrusted.
"""

import errno
import queue
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from dlion_api.addresses import join_host_port, split_host_port
from dlion_api.errors import ContractError
from dlion_api.names import OperatorIdentity, SiteName
from dlion_cli.inputs.listed_sites import TrustedSite
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.server_certificate import (
    WRONG_SERVER_ADVICE,
    PresentedCertificate,
    certificate_clock_check,
    read_certificate,
    trusted_certificate_check,
    untrusted_certificate_checks,
)
from dlion_cli.terminal.failures import message_of

MAX_ADDRESSES: Final = 8
"""Per name; the operators' gRPC also tries addresses one after the other."""
_OPEN_PORT_ADVICE: Final = (
    "open the port to this machine and to all sites (firewall, federation.service)"
)

SMALL_SEGMENT_BYTES: Final = 536
"""TCP's default; such packets pass every path."""
_FIRST_SHARE: Final = 0.6
"""Share of the time for the first handshake; the rest is for one in small segments."""
_PROTOCOLS: Final = ("h2", *(f"dlion-preflight-{number}".ljust(250, "-") for number in range(8)))
"""Protocols (ALPN). Servers take the first and ignore the others, which make the first message
longer than a packet of 1,500 bytes: so a path that loses full packets is noticed."""

Addresses = list[tuple[Any, ...]]
"""As returned by `socket.getaddrinfo`."""


class _Deadline:
    """The remaining time for a site."""

    def __init__(self, within_s: float) -> None:
        self._end_s = time.monotonic() + within_s

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0.05, so that a late operation fails by its own time-out."""
        return max(0.05, self._end_s - time.monotonic())

    def share(self, fraction: float) -> "_Deadline":
        """A deadline after that fraction of the remaining time."""
        return _Deadline(self.left_s * fraction)


@dataclass(frozen=True)
class _Connection:
    """An accepted connection, which may have been reset since."""

    socket: socket.socket
    where: str
    """The address that accepted it."""
    took_s: float


def probe_sites(sites: Sequence[TrustedSite], within_s: float) -> list[Check]:
    """The checks of all sites, in order; sites are probed in parallel.

    Each site has `within_s` seconds. An unexpected error fails only its site. Raises:
    KeyboardInterrupt immediately.
    """
    answers: queue.SimpleQueue[tuple[str, list[Check]]] = queue.SimpleQueue()

    def one(site: TrustedSite) -> None:
        try:
            checks = probe_site(site, within_s)
        except Exception as error:  # noqa: BLE001 - the server is untrusted
            checks = [Check(site.name, "tls", CheckOutcome.FAIL, message_of(error))]
        answers.put((site.name, checks))

    for site in sites:
        threading.Thread(target=one, args=(site,), daemon=True, name=f"site {site.name}").start()
    by_site = dict(answers.get() for _ in sites)
    return [check for site in sites for check in by_site[site.name]]


def probe_site(site: TrustedSite, within_s: float) -> list[Check]:
    """The checks of one site, up to the first failure; blocks for at most `within_s`."""
    deadline = _Deadline(within_s)
    host, port = split_host_port(site.address)
    try:
        addresses = _resolve(host, int(port), deadline)
    except (OSError, UnicodeError) as error:
        observed = f"{host}: {_error_text(error)}"
        advice = f"Correct the address of {site.name} in the list, or make the name resolvable here"
        return [Check(site.name, "dns", CheckOutcome.FAIL, observed, advice)]
    hosts = list(dict.fromkeys(str(each[4][0]) for each in addresses))
    literal = hosts == [host]
    observed = f"{host} is an address" if literal else f"{host} is {', '.join(hosts)}"
    checks = [Check(site.name, "dns", CheckOutcome.OK, observed)]
    connected = _connect(addresses, deadline)
    if isinstance(connected, str):
        advice = f"Correct the address of {site.name} in the list, or {_OPEN_PORT_ADVICE}"
        return [*checks, Check(site.name, "port", CheckOutcome.FAIL, connected, advice)]
    took_s = connected.took_s
    observed = f"connected to {connected.where} in {took_s * 1e3:.1f} ms from this machine"
    checks.append(
        Check(site.name, "port", CheckOutcome.OK, observed, figures={"connect_s": took_s})
    )
    return checks + _tls(site, connected.socket, addresses, deadline)


def _resolve(host: str, port: int, deadline: _Deadline) -> Addresses:
    """The first addresses of the name. Runs in a thread, because the resolver has no time-out.

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
    return answer[:MAX_ADDRESSES]


def _connect(
    addresses: Addresses, deadline: _Deadline, *, small_segments: bool = False
) -> _Connection | str:
    """A connection to the first address that accepts one, or the reasons why none does.

    `small_segments`: neither end sends more than SMALL_SEGMENT_BYTES in a packet.
    """
    failures: list[str] = []
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        connection = socket.socket(family, kind, protocol)
        if small_segments:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT_BYTES)
        connection.settimeout(deadline.left_s / (len(addresses) - index))
        where = join_host_port(*address[:2])
        began_s = time.monotonic()
        try:
            connection.connect(address)
        except OSError as error:
            connection.close()
            failures.append(f"{where}: {_error_text(error)}")
        else:
            return _Connection(connection, where, time.monotonic() - began_s)
    return "; ".join(failures)


def _tls(
    site: TrustedSite, connection: socket.socket, addresses: Addresses, deadline: _Deadline
) -> list[Check]:
    """The checks of a handshake on that connection, which is closed."""
    try:
        presented = _handshake(site, connection, deadline.share(_FIRST_SHARE), verify=True)
    except TimeoutError as error:
        return _in_small_segments(site, addresses, deadline) or [_handshake_failure(site, error)]
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message
    except (OSError, ContractError) as error:
        return [_handshake_failure(site, error)]
    else:
        return [
            trusted_certificate_check(site, presented),
            certificate_clock_check(site, presented, datetime.now(UTC)),
        ]
    again = _connect(addresses, deadline)
    try:
        if isinstance(again, str):
            raise ConnectionError(again)
        presented = _handshake(site, again.socket, deadline, verify=False)
    except (OSError, ContractError):
        observed = f"a certificate that its bundle does not verify ({why})"
        return [Check(site.name, "tls", CheckOutcome.FAIL, observed, WRONG_SERVER_ADVICE)]
    return untrusted_certificate_checks(site, presented, datetime.now(UTC), why)


def _in_small_segments(
    site: TrustedSite, addresses: Addresses, deadline: _Deadline
) -> list[Check] | None:
    """The check of the path's MTU, if a handshake succeeds in small segments alone; else None."""
    again = _connect(addresses, deadline, small_segments=True)
    if isinstance(again, str):
        return None
    try:
        presented = _handshake(site, again.socket, deadline, verify=False)
    except (OSError, ContractError):
        return None
    observed = (
        f"packets of full size are lost on the way to {again.where}: the handshake succeeds only "
        f"in segments of {SMALL_SEGMENT_BYTES} bytes"
    )
    lost = Check(site.name, "mtu", CheckOutcome.FAIL, observed, _MTU_ADVICE)
    return [lost, certificate_clock_check(site, presented, datetime.now(UTC))]


_MTU_ADVICE: Final = (
    "Lower the MTU of the interfaces to that of the path (VPN, PPPoE), let ICMP `fragmentation "
    "needed` pass, or clamp the MSS at the gateway"
)


def _handshake(
    site: TrustedSite, connection: socket.socket, deadline: _Deadline, *, verify: bool
) -> PresentedCertificate:
    """The server's certificate; without `verify`, any certificate, for inspection only.

    TLS 1.3 as operators use it: the server sends its certificate before it requests one. Raises:
    SSLCertVerificationError, OSError, ContractError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(list(_PROTOCOLS))
    if verify:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: a bundle may have no root
        context.load_verify_locations(cadata=site.bundle.pem)
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    name = OperatorIdentity(SiteName(site.name)).dns_name
    connection.settimeout(deadline.left_s)  # of the handshake as a whole
    with connection:
        connection.getpeername()  # `wrap_socket` leaves a reset connection half open
        with context.wrap_socket(connection, server_hostname=name) as secured:
            return read_certificate(secured.getpeercert(binary_form=True) or b"")


def _handshake_failure(site: TrustedSite, error: Exception) -> Check:
    if isinstance(error, TimeoutError):
        observed = "it accepts the connection, but does not respond in time"
    elif (
        isinstance(error, ssl.SSLEOFError | ConnectionError)
        or getattr(error, "errno", None) == errno.ENOTCONN  # reset before the handshake
    ):
        observed = "it closes the connection in the handshake"
    elif isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        observed = f"the server does not speak TLS 1.3 ({reason})"
    else:
        observed = str(error)
    return Check(site.name, "tls", CheckOutcome.FAIL, observed, WRONG_SERVER_ADVICE)


def _error_text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, socket.gaierror):
        return "no such host" if error.errno == socket.EAI_NONAME else str(error.strerror)
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "is not a valid name"

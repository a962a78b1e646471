"""The coordinator as a gRPC server in an asyncio loop: the operator's, or `thread`'s.

Owns the port, the server's certificate and its renewal. Puts state and service together.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import grpc
from cryptography import x509

from dlion_api.errors import UnavailableError
from dlion_api.refusals import MAX_REPORT_BYTES, RefusalReason
from dlion_api.worker_config import COORDINATOR_DNS_NAME
from dlion_operator.coordinator.service import CoordinationService, TokenVerifier
from dlion_operator.coordinator.state import Coordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlion_api.membership import Membership
    from dlion_api.names import SiteName
    from dlion_api.progress import ProgressRecord
    from dlion_api.spec import Job
    from dlion_operator.authority import Authority

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A little more than the protocol allows, so that such a report is refused by name.
    ("grpc.max_receive_message_length", 2 * MAX_REPORT_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    # A worker whose node or link is gone without a word is lost after 15 s at most.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A machine that was stopped for a while sends its pings late and close together: no offence.
    ("grpc.http2.max_ping_strikes", 0),
    # One port, one server: another process on it is an error, not a partner.
    ("grpc.so_reuseport", 0),
)


class CoordinatorServer:
    """One run's coordinator. Every method is called in the loop that started it."""

    def __init__(
        self,
        listen_address: str,
        job: Job,
        *,
        authorities: Mapping[SiteName, Authority],
        tokens: TokenVerifier,
        on_record: Callable[[ProgressRecord], None],
        start_time_monotonic_s: float | None = None,
    ) -> None:
        """No port is opened yet.

        `authorities` holds every site whose workers are signed for here; empty means no TLS. The
        first site's signs the server's own certificate. `on_record` runs in the loop: it must
        neither block nor raise.
        """
        self._listen_address = listen_address
        self._authorities = dict(authorities)
        self._state = Coordinator(job.key, job.workers(), job.hash())
        self._service = CoordinationService(
            self._state,
            authorities=self._authorities,
            tokens=tokens,
            on_record=on_record,
            start_time_monotonic_s=(
                time.monotonic() if start_time_monotonic_s is None else start_time_monotonic_s
            ),
        )
        # Every worker holds one stream and has at most a report and two signings under way.
        self._max_calls = 4 * len(job.workers()) + 64
        self._server: grpc.aio.Server | None = None

    @property
    def authority_pem(self) -> bytes:
        """What a worker trusts this server by; empty without TLS."""
        return self._own_authority().bundle_pem if self._authorities else b""

    async def start(self) -> int:
        """Opens the port and yields its number.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=self._max_calls)
        server.add_generic_rpc_handlers((self._service.handler(),))
        try:
            port = self._open_port(server)
        except RuntimeError as error:
            raise UnavailableError(
                f"coordinator cannot listen on {self._listen_address}: {error}; choose another"
            ) from error
        await server.start()
        self._server = server
        return port

    def stop(self, reason: str) -> None:
        """Asks every worker to end the run: at once by its stream, and in each reply."""
        self._service.stop(reason)

    def membership(self) -> Membership:
        """The membership as it stands."""
        return self._state.membership()

    def refusals(self) -> Mapping[RefusalReason, int]:
        """Refused calls by reason since the start."""
        return dict(self._state.refusals)

    async def close(self) -> None:
        """Closes the port and every stream at once."""
        self._service.close()
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    def _open_port(self, server: grpc.aio.Server) -> int:
        if not self._authorities:
            return server.add_insecure_port(self._listen_address)
        certificate = ServerCertificate(self._own_authority())
        credentials = grpc.dynamic_ssl_server_credentials(
            certificate.current(),
            certificate.renewed,  # type: ignore[arg-type]  # None is "unchanged", says gRPC
            require_client_authentication=False,
        )
        return server.add_secure_port(self._listen_address, credentials)

    def _own_authority(self) -> Authority:
        return next(iter(self._authorities.values()))


class ServerCertificate:
    """The server's own certificate, made anew when two thirds of its life have passed."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._renew_at = datetime.now(UTC)
        self._configuration = self._make()

    def current(self) -> grpc.ServerCertificateConfiguration:
        """What the server presents now."""
        return self._configuration

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """A new certificate where one is due, else None: gRPC asks at each handshake."""
        if datetime.now(UTC) < self._renew_at:
            return None
        self._configuration = self._make()
        return self._configuration

    def _make(self) -> grpc.ServerCertificateConfiguration:
        now = datetime.now(UTC)
        identity = self._authority.server_identity(COORDINATOR_DNS_NAME, now=now)
        certificate = x509.load_pem_x509_certificate(identity.certificate_chain_pem)
        self._renew_at = now + (certificate.not_valid_after_utc - now) * 2 / 3
        return grpc.ssl_server_certificate_configuration(
            [(identity.key_pem, identity.certificate_chain_pem)]
        )

"""The coordinator's gRPC server, in the asyncio loop of the operator or of `thread`."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import grpc

from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Membership
from dlion_api.protocol.port_limits import connection_options
from dlion_api.protocol.progress import ProgressRecord
from dlion_api.protocol.refusals import MAX_REPORT_BYTES
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.spec import Job
from dlion_operator.coordinator.feed import MAX_FEED_BYTES, RecordFeed
from dlion_operator.coordinator.served_run import ServedRun, Signer, TokenVerifier
from dlion_operator.coordinator.service import CoordinationService
from dlion_operator.coordinator.state import CoordinatorState
from dlion_operator.kubernetes.wire_parsing import SERVER_OPTIONS
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.pki.authority import CertificateAuthority, ServerIdentity

MAX_CALLS = 16_384
"""Concurrent calls. A worker holds one stream and at most one report and two signing calls."""

MAX_CONNECTIONS = 8192
"""A trainer holds one, a sidecar a second one while it asks for a certificate."""

MAX_CALLS_PER_CONNECTION = 16
"""Further ones wait."""

_OPTIONS = (
    *SERVER_OPTIONS,
    # Above the protocol's limit, so that a report just over it is refused with a reason.
    ("grpc.max_receive_message_length", 2 * MAX_REPORT_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    *connection_options(MAX_CONNECTIONS, max_calls_per_connection=MAX_CALLS_PER_CONNECTION),
)


class CoordinatorServer:
    """One port that serves the coordinators of all open runs.

    Call every method in the loop that started the server, or before the start.
    """

    def __init__(self, listen_address: str, authority: CertificateAuthority | None) -> None:
        """`authority` signs the server's own certificate; None: no TLS. Opens no port yet."""
        self._listen_address = listen_address
        self._certificate = ServerCertificate(authority) if authority else None
        self.service = CoordinationService()
        self.runs: dict[JobKey, ServedRun] = {}
        """The open runs."""
        self._bundles: Mapping[SiteName, bytes] = {}
        self._server: grpc.aio.Server | None = None
        self.on_keeper_refused: Callable[[JobKey, str, str], None] = lambda *_: None
        """Called with each reason for new refusals by a keeper, and the last message.

        Runs in the event loop: it must neither block nor raise.
        """

    @property
    def authority_pem(self) -> bytes:
        """CA bundle that workers verify this server with; empty without TLS."""
        return self._certificate.authority.bundle_pem if self._certificate else b""

    async def start(self) -> int:
        """Open the port and return its number.

        Raises: UnavailableError if the server cannot listen on the address.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers((self.service.handler(),))
        try:
            port = self._open_port(server)
        except RuntimeError as error:
            raise UnavailableError(
                f"coordinator cannot listen on {self._listen_address}: {error}; choose another"
            ) from error
        await server.start()
        self._server = server
        return port

    def open(
        self,
        job: Job,
        *,
        authorities: Mapping[SiteName, Signer],
        tokens: TokenVerifier,
        on_record: Callable[[ProgressRecord], None],
        bundles: Mapping[SiteName, bytes] | None = None,
        workers: Sequence[WorkerIdentity] | None = None,
        spec_hash: str | None = None,
        start_time_monotonic_s: float | None = None,
        job_uid: str = "",
        feed_limit_bytes: int = MAX_FEED_BYTES,
    ) -> None:
        """Serve a run. Its workers may have joined an earlier coordinator before.

        Args:
            authorities: One for each site that this server signs for; empty: no TLS.
            on_record: Called in the event loop; it must neither block nor raise.
            bundles: The run's own CA bundles, which `ServedRun.trust` changes. None: those
                of all runs.
            workers: The expected workers, if fewer than the manifest's.
            spec_hash: The manifest's hash, if another release began the run.
            start_time_monotonic_s: When the run began; None: now.
            job_uid: UID of the DLionJob, which workers' checkpoints are bound to; empty: they
                have no MAC.
            feed_limit_bytes: Memory for records that followers have not read.

        Raises: ValueError if the run is already open.
        """
        if job.key in self.runs:
            raise ValueError(f"run {job.key} is open; close it first")
        self.runs[job.key] = self.service.runs[str(job.key)] = ServedRun(
            CoordinatorState(
                job.key, job.workers() if workers is None else workers, spec_hash or job.hash()
            ),
            RecordFeed(uuid.uuid4().hex, limit_bytes=feed_limit_bytes),
            authorities=authorities,
            bundles=self._bundles if bundles is None else bundles,
            has_own_trust=bundles is not None,
            tokens=tokens,
            on_record=on_record,
            checkpoint_key=lambda rank: self._checkpoint_key(job_uid, job.key, rank),
            on_keeper_refused=lambda *refusal: self.on_keeper_refused(*refusal),
            start_time_monotonic_s=(
                time.monotonic() if start_time_monotonic_s is None else start_time_monotonic_s
            ),
        )

    def _checkpoint_key(self, job_uid: str, job: JobKey, rank: Rank) -> bytes:
        if self._certificate is None or not job_uid:
            return b""
        return self._certificate.authority.checkpoint_key(job_uid, job, rank)

    def trust(self, bundles: Mapping[SiteName, bytes]) -> None:
        """Set the CA bundles of the sites, except for runs with their own bundles."""
        self._bundles = dict(bundles)
        for run in self.runs.values():
            if not run.has_own_trust:
                run.trust(bundles)

    def close(self, run: JobKey) -> None:
        """Stop serving a run; its calls are refused as for an unknown run."""
        del self.service.runs[str(run)]
        self.runs.pop(run).close()

    def membership(self, run: JobKey) -> Membership:
        return self.runs[run].state.membership()

    def downloads(self, run: JobKey) -> Mapping[str, DownloadProgress]:
        return dict(self.runs[run].state.downloads)

    def replace_authority(self, authority: CertificateAuthority) -> None:
        """Use `authority` for its site's workers and for this server's certificate."""
        if self._certificate is not None and self._certificate.authority.site == authority.site:
            self._certificate.replace_authority(authority)
        for run in self.runs.values():
            if not run.has_own_trust:
                run.replace_authority(authority)

    async def shut_down(self) -> None:
        """Close the port and every stream immediately."""
        for run in self.runs.values():
            run.close()
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    def _open_port(self, server: grpc.aio.Server) -> int:
        if self._certificate is None:
            return server.add_insecure_port(self._listen_address)
        credentials = grpc.dynamic_ssl_server_credentials(
            self._certificate.configuration,
            self._certificate.renewed,  # type: ignore[arg-type]  # gRPC takes None as "unchanged"
            require_client_authentication=False,
        )
        return server.add_secure_port(self._listen_address, credentials)


class ServerCertificate:
    """The server's certificate, renewed after half of its lifetime."""

    def __init__(self, authority: CertificateAuthority) -> None:
        self.authority = authority
        self._identity: ServerIdentity | None = None
        """The one in use; None: another authority is to sign the next one."""
        self.configuration = self._make(datetime.now(UTC))

    def replace_authority(self, authority: CertificateAuthority) -> None:
        """Use a certificate by `authority` from the next handshake on."""
        self.authority = authority
        self._identity = None

    def renewed(self, *, now: datetime | None = None) -> grpc.ServerCertificateConfiguration | None:
        """Return a new certificate if due, else None. gRPC calls this at each handshake."""
        now, identity = now or datetime.now(UTC), self._identity
        if identity is not None and not identity.is_renewal_due(now):
            return None
        self.configuration = self._make(now)
        return self.configuration

    def _make(self, now: datetime) -> grpc.ServerCertificateConfiguration:
        identity = self.authority.server_identity(COORDINATOR_DNS_NAME, now=now)
        self._identity = identity
        return grpc.ssl_server_certificate_configuration(
            [(identity.key_pem, identity.certificate_chain_pem)]
        )

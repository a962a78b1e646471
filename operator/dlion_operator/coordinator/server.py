"""The coordinator as a gRPC server in an asyncio loop: the operator's, or `thread`'s.

Owns the port, the server's certificate and its renewal, and which runs are open.
"""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import grpc
from cryptography import x509

from dlion_api.errors import UnavailableError
from dlion_api.refusals import MAX_REPORT_BYTES, RefusalReason
from dlion_api.trust import renewal_after
from dlion_api.worker_config import COORDINATOR_DNS_NAME
from dlion_operator.coordinator.feed import MAX_FEED_BYTES, RecordFeed
from dlion_operator.coordinator.served_run import ServedRun, Signer, TokenVerifier
from dlion_operator.coordinator.service import CoordinationService
from dlion_operator.coordinator.state import Coordinator

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from dlion_api.membership import Member, Membership
    from dlion_api.names import JobKey, SiteName, WorkerIdentity
    from dlion_api.progress import ProgressRecord
    from dlion_api.spec import Job
    from dlion_operator.authority import Authority
    from dlion_operator.coordinator.events import Refuse

MAX_CALLS = 16_384
"""Under way at once. Every worker holds one stream and has at most a report and two signings."""

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
    """One port, and the coordinators of all runs that are open on it.

    Every method is called in the loop that started it, or before it starts.
    """

    def __init__(self, listen_address: str, authority: Authority | None) -> None:
        """No port is opened yet. `authority` signs the server's own certificate; None: no TLS."""
        self._listen_address = listen_address
        self._certificate = ServerCertificate(authority) if authority else None
        self._service = CoordinationService()
        self._runs: dict[JobKey, ServedRun] = {}
        self._bundles: Mapping[SiteName, bytes] = {}
        self._server: grpc.aio.Server | None = None
        self._on_keeper_refused: Callable[[JobKey, str, str], None] = lambda *_: None

    @property
    def authority_pem(self) -> bytes:
        """What a worker trusts this server by; empty without TLS."""
        return self._certificate.authority.bundle_pem if self._certificate else b""

    @property
    def runs(self) -> Collection[JobKey]:
        """The runs that are open."""
        return self._runs.keys()

    async def start(self) -> int:
        """Opens the port and yields its number.

        Raises:
            UnavailableError: the address cannot be listened on.
        """
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
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
        feed_limit_bytes: int = MAX_FEED_BYTES,
    ) -> None:
        """Serves that run from now on; its workers may have known it from an earlier coordinator.

        `authorities` holds every site whose workers are signed for here; empty means that links
        are open. `on_record` runs in the loop: it must neither block nor raise. `bundles` where
        this run's workers know other sites, and their own, by authorities of their own, which
        `trust_in` changes; None: by those of all runs. `workers` where
        they are fewer than the manifest's, `spec_hash` where another release began the run.
        `start_time_monotonic_s` is when
        the run began, by this machine's clock: now, unless it is taken up again. So much of its
        records is kept for followers.

        Raises:
            ValueError: that run is open.
        """
        if job.key in self._runs:
            raise ValueError(f"run {job.key} is open; close it first")
        self._runs[job.key] = self._service.runs[str(job.key)] = ServedRun(
            Coordinator(
                job.key, job.workers() if workers is None else workers, spec_hash or job.hash()
            ),
            RecordFeed(uuid.uuid4().hex, limit_bytes=feed_limit_bytes),
            authorities=authorities,
            bundles=self._bundles if bundles is None else bundles,
            has_own_trust=bundles is not None,
            tokens=tokens,
            on_record=on_record,
            on_keeper_refused=lambda *told: self._on_keeper_refused(*told),
            start_time_monotonic_s=(
                time.monotonic() if start_time_monotonic_s is None else start_time_monotonic_s
            ),
        )

    def expect(self, run: JobKey, workers: Sequence[WorkerIdentity]) -> None:
        """Admits these workers from now on, their ranks unchanged; others may end in order.

        Raises:
            KeyError: that run is not open.
        """
        self._runs[run].expect(workers)

    def tell_others(self, run: JobKey, members: Sequence[Member]) -> None:
        """Puts members that have joined elsewhere into the run's membership, or changes them.

        Raises:
            KeyError: that run is not open.
        """
        self._runs[run].tell_others(members)

    def trust(self, bundles: Mapping[SiteName, bytes]) -> None:
        """Workers know other sites by these bundles from now on, but those of runs that have
        bundles of their own."""
        self._bundles = dict(bundles)
        for run in self._runs.values():
            if not run.has_own_trust:
                run.trust(bundles)

    def trust_in(self, run: JobKey, authority: Signer, bundles: Mapping[SiteName, bytes]) -> None:
        """That run, opened with bundles of its own, has these from now on, and that authority.

        Raises:
            KeyError: that run is not open.
        """
        self._runs[run].replace_authority(authority)
        self._runs[run].trust(bundles)

    def take(self, run: JobKey, record: ProgressRecord) -> None:
        """Puts a record of this side's own among those of the workers."""
        self._runs[run].take(record)

    def stop(self, run: JobKey, reason: str) -> None:
        """Asks every worker to end the run: at once by its stream, and in each reply."""
        self._runs[run].stop(reason)

    def finish(self, run: JobKey, reason: str, *, succeeded: bool) -> None:
        """Tells the run's followers that it is over, also those that come until it is closed."""
        self._runs[run].finish(reason, succeeded=succeeded)

    def close(self, run: JobKey) -> None:
        """Serves that run no more; its calls are refused from now on, as not known (yet)."""
        del self._service.runs[str(run)]
        self._runs.pop(run).close()

    def membership(self, run: JobKey) -> Membership:
        """The run's membership as it stands."""
        return self._runs[run].state.membership()

    def refusals(self) -> Mapping[RefusalReason, int]:
        """Refused calls by reason since the start, of all runs."""
        return dict(self._service.refusals)

    def calls(self) -> Mapping[str, int]:
        """Calls by name since the start, of all runs."""
        return dict(self._service.calls)

    def on_refused(self, told: Callable[[str, Refuse], None]) -> None:
        """From now on `told` hears of each refusal, and which run the caller named, if any. It runs
        in the loop: it must neither block nor raise."""
        self._service.on_refused = told

    def on_keeper_refused(self, told: Callable[[JobKey, str, str], None]) -> None:
        """From now on `told` hears for which reasons keepers have refused more callers, with the
        words of the last one. It runs in the loop: it must neither block nor raise."""
        self._on_keeper_refused = told

    def keeper_refusals(self) -> Mapping[JobKey, Mapping[str, int]]:
        """Of each run that is open, whom this site's keeper has refused since it began."""
        return {key: run.keeper_refusals for key, run in self._runs.items()}

    def replace_authority(self, authority: Authority) -> None:
        """Signs with that one from now on, for its site's workers and for this server itself."""
        if self._certificate is not None and self._certificate.authority.site == authority.site:
            self._certificate.replace_authority(authority)
        for run in self._runs.values():
            if not run.has_own_trust:
                run.replace_authority(authority)

    async def shut_down(self) -> None:
        """Closes the port and every stream at once."""
        for run in self._runs.values():
            run.close()
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    def _open_port(self, server: grpc.aio.Server) -> int:
        if self._certificate is None:
            return server.add_insecure_port(self._listen_address)
        credentials = grpc.dynamic_ssl_server_credentials(
            self._certificate.current(),
            self._certificate.renewed,  # type: ignore[arg-type]  # None is "unchanged", says gRPC
            require_client_authentication=False,
        )
        return server.add_secure_port(self._listen_address, credentials)


class ServerCertificate:
    """The server's own certificate, made anew when half of its life has passed."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self._renew_at = datetime.now(UTC)
        self._configuration = self._make()

    def current(self) -> grpc.ServerCertificateConfiguration:
        """What the server presents now."""
        return self._configuration

    def replace_authority(self, authority: Authority) -> None:
        """The next handshake gets a certificate of that one."""
        self.authority = authority
        self._renew_at = datetime.now(UTC)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """A new certificate where one is due, else None: gRPC asks at each handshake."""
        if datetime.now(UTC) < self._renew_at:
            return None
        self._configuration = self._make()
        return self._configuration

    def _make(self) -> grpc.ServerCertificateConfiguration:
        now = datetime.now(UTC)
        identity = self.authority.server_identity(COORDINATOR_DNS_NAME, now=now)
        certificate = x509.load_pem_x509_certificate(identity.certificate_chain_pem)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        self._renew_at = now + renewal_after(begins, ends)
        return grpc.ssl_server_certificate_configuration(
            [(identity.key_pem, identity.certificate_chain_pem)]
        )

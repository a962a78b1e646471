"""A whole sidecar: the director between its sockets.

Owns the order in which parts start and end, and the certificate's renewal. Called by `__main__`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from wsgiref.simple_server import WSGIServer

from dlion_api.addresses import joined
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.local_messages import SidecarRecord, TrainerRecord
from dlion_api.measurements import (
    Capacity,
    Directive,
    MeasuringEndpoint,
    Peers,
    StreamRefusals,
)
from dlion_api.spec import Job
from dlion_api.trust import trust_print
from dlion_api.worker_config import WorkerConfig
from dlion_worker.coordination.signing import SignedCertificate, request_certificate
from dlion_worker.credentials import WorkerCredentials, WorkerKey, renewal_due_s
from dlion_worker.sidecar.director import Director
from dlion_worker.sidecar.local_server import LocalServer
from dlion_worker.sidecar.measuring_service import MeasuringServer, MeasuringService
from dlion_worker.sidecar.metrics import Reading, SidecarMetrics, serve_metrics
from dlion_worker.sidecar.node_facts import read_node_facts
from dlion_worker.sidecar.peer_caller import PeerCaller
from dlion_worker.sidecar.refusals import Refusals

_LOG = logging.getLogger(__name__)

PROBE_TICK_S = 1.0
PORT_FILE = "measuring-port"
"""A sidecar that restarts takes the same port again: its peers need not hear of it."""


class Sidecar:
    """One worker's sidecar; also what the two ends of the measuring service need of it."""

    def __init__(
        self, config: WorkerConfig, job: Job, *, metrics_host: str, metrics_port: int
    ) -> None:
        self._config, self._job = config, job
        self._identity = job.worker(config.rank)
        self._metrics_address = (metrics_host, metrics_port)
        self._director = Director(job, config.rank)
        self._endpoint: MeasuringEndpoint | None = None
        self._caller: PeerCaller | None = None
        self._credentials = WorkerCredentials.insecure()
        """Until there is a certificate, where there is to be one."""
        self._trust = ""
        """By which bundles the trainer knows peers; empty: it has not told."""
        self._told: Capacity | None = None
        self._local = LocalServer(
            config.socket_path, on_record=self._take, on_connected=self._first_words
        )
        self._refusals = Refusals(self._local.tell)
        self.refused = self._refusals.refused

    async def run(self, stopped: asyncio.Event) -> None:
        """Serves until stopped.

        Raises: SpecError where the socket path will not do; OSError where an address cannot be
            had; ContractError where the coordinator refuses this worker for good.
        """
        await self._local.start()
        try:
            metrics = self._serve_metrics()
            try:
                await self._measure(stopped)
            finally:
                metrics.shutdown()
                metrics.server_close()
        finally:
            await self._local.close()

    # ---- what the measuring service and the caller need ----------------------------------------

    def own(self) -> Capacity:
        """What is told of this worker: its published capacity, and where groups go by links these
        and the grouping."""
        return self._director.own()

    def incarnation(self) -> int:
        """Which start of this worker the membership knows."""
        return self._director.incarnation()

    def heard(self, capacity: Capacity, incarnation: int) -> None:
        """A peer's sidecar told its worker's capacity."""
        self._issue(self._director.heard(capacity, incarnation))

    # ---- trainer -------------------------------------------------------------------------------

    def _first_words(self) -> tuple[SidecarRecord, ...]:
        self._director.trainer_started()
        words = (self._endpoint, self._director.directive)
        return tuple(word for word in words if word is not None)

    def _take(self, record: TrainerRecord) -> None:
        if isinstance(record, StreamRefusals):
            self._refusals.heard(record)
            return
        self._issue(self._director.handle(record, time.monotonic()))
        if isinstance(record, Peers):
            self._trust = record.trust
        if self._caller is None:
            return
        if isinstance(record, Peers):
            self._caller.set_peers(self._director.peers())
        self._tell_news()

    def _tell_news(self) -> None:
        if self._caller is not None and self.own() != self._told:
            self._told = self.own()
            self._caller.tell()

    def _issue(self, directive: Directive | None) -> None:
        if directive is not None:
            _LOG.info("directive %d: %s", directive.version, directive.reason)
            self._local.tell(directive)

    # ---- peers ---------------------------------------------------------------------------------

    async def _measure(self, stopped: asyncio.Event) -> None:
        """Serves and calls peers, with a fresh certificate whenever half of one's life is over, or
        the trainer says that other bundles hold."""
        if self._job.spec.tls.mode != "Disabled":
            first = await self._signed(stopped)
            if first is None:
                return
            key, signed = first
            self._credentials = WorkerCredentials(key, signed.chain_pem, signed.site_bundles_pem)
        credentials = self._credentials
        async with self._connected(credentials):
            while not stopped.is_set():
                # What the trainer says once more is no news: it may be behind, or ahead.
                current = {"", trust_print(credentials.site_bundles_pem), self._trust}
                await self._probe_until(stopped, _renewal_s(credentials), current)
                if (renewed := await self._signed(stopped)) is not None:
                    key, signed = renewed
                    credentials.trust(signed.site_bundles_pem)
                    credentials.renew(key, signed.chain_pem)

    async def _signed(self, stopped: asyncio.Event) -> tuple[WorkerKey, SignedCertificate] | None:
        """A new key and its certificate; None: stopped before the coordinator answered."""
        if stopped.is_set():
            return None
        key = WorkerKey()
        try:
            signed = await asyncio.to_thread(
                request_certificate,
                self._config,
                job=self._job.key,
                worker=self._identity,
                csr_pem=key.csr_pem(),
                role="sidecar",
                stopped=stopped.is_set,
            )
        except UnavailableError:
            if stopped.is_set():
                return None
            raise
        return key, signed

    @contextlib.asynccontextmanager
    async def _connected(self, credentials: WorkerCredentials) -> AsyncIterator[None]:
        service = MeasuringService(
            job=self._job, rank=self._config.rank, worker=self, credentials=credentials
        )
        server = MeasuringServer(service, credentials)
        port = await server.start(self._config.listen_host, preferred_port=self._preferred_port())
        self._port_file.write_text(f"{port}\n")
        endpoint = MeasuringEndpoint(joined(self._config.advertise_host, port))
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._local.tell(endpoint)
            _LOG.info("answering other sidecars at %s", endpoint.address)
        self._caller = PeerCaller(
            job=self._job.key,
            rank=self._config.rank,
            worker=self,
            credentials=credentials,
            dial=lambda rank: self._config.link_address(rank, "measuring"),
            by_gateway=self._job.spec.network.exposure == "Gateway",
        )
        self._caller.set_peers(self._director.peers())
        try:
            yield
        finally:
            caller, self._caller = self._caller, None
            await caller.close()
            await server.stop()

    @property
    def _port_file(self) -> Path:
        return Path(self._config.state_dir) / PORT_FILE

    def _preferred_port(self) -> int:
        """The port that the configuration names, else the one that this worker had before."""
        if self._config.measuring_port:
            return self._config.measuring_port
        try:
            text = self._port_file.read_text().strip()
        except OSError:
            return 0
        return int(text) if text.isdecimal() and 0 < int(text) < 65536 else 0

    async def _probe_until(
        self, stopped: asyncio.Event, seconds: float | None, current: Collection[str]
    ) -> None:
        """Probes links that have been idle, one at a time, until stopped, time is up, or the
        bundles that hold are none of the current ones."""
        end_s = math.inf if seconds is None else time.monotonic() + seconds
        while not stopped.is_set() and time.monotonic() < end_s and self._trust in current:
            for _ in self._director.peers():  # one that hangs is due again when it is given up
                if stopped.is_set() or not await self._probe_one():
                    break
            self._issue(self._director.look(time.monotonic()))
            self._tell_news()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_TICK_S):
                    await stopped.wait()

    async def _probe_one(self) -> bool:
        """Whether there was a link to probe (asking for one counts, so this comes to an end)."""
        member = self._director.link_to_probe(time.monotonic())
        if member is None or self._caller is None:
            return False
        rank = member.identity.rank
        try:
            busy_bytes, seconds = await self._caller.probe(member)
        except (UnavailableError, ContractError) as error:
            _LOG.info("%s", error)
            return True
        _LOG.info("link to %d alone: %.3g MB/s", rank, busy_bytes / seconds / 1e6)
        self._issue(self._director.probed(rank, busy_bytes, seconds, time.monotonic()))
        return True

    # ---- metrics -------------------------------------------------------------------------------

    def _serve_metrics(self) -> WSGIServer:
        host, port = self._metrics_address
        metrics = SidecarMetrics(
            job=self._job.key,
            site=self._identity.site,
            site_of=lambda rank: self._job.worker(rank).site,
            read=self._reading,
        )
        server, _ = serve_metrics(metrics, host=host, port=port)
        _LOG.info("metrics at http://%s/metrics", joined(host, server.server_port))
        return server

    def _reading(self) -> Reading:
        director = self._director
        return Reading(
            capacity=self.own(),
            directive=director.directive,
            allowance=director.allowance,
            steps=director.steps_total,
            samples=director.samples_total,
            iteration_s=director.links.iteration_s(),
            trainer_connected=self._local.connected(),
            refused=self._refusals.messages(),
            refusals=self._refusals.counts(),
            renewals=self._credentials.renewals,
            node=read_node_facts(),
        )


def _renewal_s(credentials: WorkerCredentials) -> float | None:
    """Seconds until a certificate that was signed just now is to be replaced; None without one."""
    return renewal_due_s(credentials.shown()[1]) if credentials.enabled else None

"""Starts and stops a whole sidecar: controller, sockets, metrics and certificate renewal."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from dlion_api.addresses import join_host_port
from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank, SiteName
from dlion_api.protocol.measurements import (
    Capacity,
    CpuAllowance,
    Directive,
    LinkDelivery,
    MeasuringEndpoint,
    MeasuringSent,
    Peers,
    StepTiming,
    StreamRefusals,
    TrainerAlive,
)
from dlion_api.protocol.sidecar_protocol import SidecarRecord, TrainerRecord
from dlion_api.protocol.trust import trust_fingerprint
from dlion_api.protocol.worker_config import WorkerConfig
from dlion_api.spec import Job
from dlion_core.demand.demand_predictor import predicts_demand
from dlion_core.heat.heat_controller import SAMPLE_S
from dlion_core.resource_control.resource_controller import ResourceController
from dlion_worker.artifact_client import ArtifactClient
from dlion_worker.coordination.signing import SignedCertificate, request_certificate
from dlion_worker.metrics_server import MetricsServer, serve_metrics
from dlion_worker.security.credentials import WorkerCredentials, WorkerKey
from dlion_worker.sidecar.demand_prediction import DemandPrediction
from dlion_worker.sidecar.heat_budget import HeatBudget
from dlion_worker.sidecar.link_connections import LinkConnections
from dlion_worker.sidecar.log_upload import LogUpload
from dlion_worker.sidecar.measuring_service import MeasuringService
from dlion_worker.sidecar.metrics import MetricsReading, SidecarMetrics
from dlion_worker.sidecar.node_facts import read_node_facts
from dlion_worker.sidecar.peer_client import PeerSidecarClient
from dlion_worker.sidecar.refusal_counter import RefusalCounter
from dlion_worker.sidecar.trainer_socket import TrainerSocket
from dlion_worker.sidecar.trainer_totals import LinkBytes, StepSeconds

_LOG = logging.getLogger(__name__)

PROBE_TICK_S = 1.0
PORT_FILE = "measuring-port"
"""A restarted sidecar reuses its port, so that peers need no new address."""


class SidecarProcess:
    """One worker's sidecar; the measuring service and client call it back."""

    def __init__(
        self,
        config: WorkerConfig,
        job: Job,
        *,
        metrics_host: str,
        metrics_port: int,
        trainer_output: Path | None = None,
        machine_root: Path = Path("/"),
    ) -> None:
        """`trainer_output`: the log whose end goes to the keeper, if there is one. `machine_root`:
        the folder with the machine's `proc` and `sys`."""
        self._config, self._job = config, job
        self._trainer_output = trainer_output
        self._identity = job.worker(config.rank)
        self._metrics_address = (metrics_host, metrics_port)
        self._controller = ResourceController(job, config.rank)
        self.own, self.incarnation = self._controller.own, self._controller.incarnation
        self.is_revoked = self._controller.is_revoked
        self._step_seconds, self._link_bytes = StepSeconds(), LinkBytes()
        self._connections = LinkConnections()
        self._unreported_bytes: Counter[Rank] = Counter()
        """What went to peers' sidecars since the trainer's last step."""
        self._members: frozenset[Rank] = frozenset()
        """All ranks of the membership that the trainer reported last."""
        self._machine_root = machine_root
        policy = job.spec.node_policies.heat
        self._heat = None if policy is None else HeatBudget(policy, machine_root)
        self._demand = DemandPrediction(machine_root) if predicts_demand(job.spec) else None
        self._endpoint: MeasuringEndpoint | None = None
        self._caller: PeerSidecarClient | None = None
        self._credentials = WorkerCredentials.insecure()
        """Insecure until there is a certificate, if one is required."""
        self._trust = ""
        """Fingerprint of the bundles by which the trainer trusts peers; empty: not reported."""
        self._last_shared: Capacity | None = None
        self._heard_s = time.monotonic()
        """When the trainer last sent something."""
        self._local = TrainerSocket(
            config.socket_path, on_record=self._handle_record, on_connected=self._initial_records
        )
        self._refusals = RefusalCounter(self._local.send)
        self.refused = self._refusals.refused

    async def run(self, stopped: asyncio.Event) -> None:
        """Serve until stopped.

        Raises: SpecError if the socket path is unusable; OSError if an address is unavailable;
        ContractError if the coordinator rejects this worker permanently.
        """
        await self._local.start()
        try:
            metrics = self._serve_metrics()
            heat = asyncio.create_task(self._keep_cool())
            try:
                await self._serve_peers(stopped)
            finally:
                heat.cancel()
                await asyncio.gather(heat, return_exceptions=True)
                metrics.shutdown()
                metrics.server_close()
        finally:
            await self._local.close()

    # ---- for the measuring service and client ----------------------------------------------------

    def handle_capacity(self, capacity: Capacity, incarnation: int) -> None:
        """Handle a peer's capacity. Raises: ContractError if its grouping is invalid."""
        self._issue(self._controller.handle_capacity(capacity, incarnation))

    def count_sent(self, peer: Rank, sent_bytes: int) -> None:
        """Count what went to a peer's sidecar, for the trainer, which counts all bytes of a link.

        The record follows the next step: then the trainer is connected, and has its links.
        """
        self._unreported_bytes[peer] += sent_bytes

    # ---- trainer -------------------------------------------------------------------------------

    def _initial_records(self) -> tuple[SidecarRecord, ...]:
        self._controller.trainer_started()
        if self._demand is not None:
            self._demand.trainer_started()
        self._heard_s = time.monotonic()
        records = (self._endpoint, self._controller.directive)
        return tuple(record for record in records if record is not None)

    def _handle_record(self, record: TrainerRecord) -> None:
        self._heard_s = time.monotonic()
        if isinstance(record, TrainerAlive):
            return
        if isinstance(record, StreamRefusals):
            self._refusals.set_stream_refusals(record)
            return
        if isinstance(record, LinkDelivery):
            if record.peer not in self._members:
                return  # what is kept by peer stays bounded
            self._link_bytes.add(record)
        elif isinstance(record, StepTiming):
            self._step_seconds.add(record)
            for peer, sent_bytes in self._unreported_bytes.items():
                self._local.send(MeasuringSent(peer, sent_bytes))
            self._unreported_bytes.clear()
            if self._heat is not None:
                self._heat.add_step(record)
        self._issue(self._controller.handle(record, now_s := time.monotonic()))
        if self._demand is not None:
            self._predict(self._demand, record, now_s)
        if isinstance(record, Peers):
            self._trust = record.trust
            self._members = frozenset(each.identity.rank for each in record.membership.members)
            self._connections.set_addresses(self._exchange_addresses())
        if self._caller is None:
            return
        if isinstance(record, Peers):
            self._caller.set_peers(self._controller.peers)
        self._notify_peers()

    def _exchange_addresses(self) -> Iterator[tuple[str, SiteName]]:
        """Where links end."""
        for peer in self._controller.peers:
            dialled = self._config.link_address(peer.identity.rank, "exchange")
            yield dialled or peer.exchange_address, peer.identity.site

    def _notify_peers(self) -> None:
        if self._caller is not None and self.own() != self._last_shared:
            self._last_shared = self.own()
            self._caller.notify()

    def _issue(self, directive: Directive | None) -> None:
        if directive is not None:
            _LOG.info("directive %d: %s", directive.version, directive.reason)
            self._local.send(directive)

    def _predict(self, demand: DemandPrediction, record: TrainerRecord, now_s: float) -> None:
        """Let the worker's speed follow what other work is expected to take."""
        if isinstance(record, CpuAllowance):
            demand.set_allowance(record)
        elif isinstance(record, StepTiming):
            measured = self._controller.measured_samples_per_s()
            decision = demand.add_step(record, now_s, measured)
            if decision is not None:
                speed, why = decision.samples_per_s, decision.reason()
                self._issue(self._controller.set_expected_speed(speed, why, now_s))

    async def _keep_cool(self) -> None:
        """Sample the temperature at intervals and pass on the share of compute; until cancelled."""
        while self._heat is not None:
            decision = self._heat.sample(now_s := time.monotonic())
            share, mean_share = decision.share, decision.mean_share
            self._issue(self._controller.set_compute_share(share, mean_share, now_s))
            self._notify_peers()
            await asyncio.sleep(SAMPLE_S)

    # ---- peers ---------------------------------------------------------------------------------

    async def _serve_peers(self, stopped: asyncio.Event) -> None:
        """Serve and call peers; renew the certificate at half of its lifetime, or when the trainer
        reports other bundles."""
        if self._job.spec.tls.mode != "Disabled":
            if (first := await self._signed(stopped)) is None:
                return
            key, signed = first
            self._credentials = WorkerCredentials(key, signed.chain_pem, signed.site_bundles_pem)
        credentials = self._credentials
        async with self._uploading_log(credentials), self._connected(credentials):
            while not stopped.is_set():
                # A fingerprint that was current before is not a change: the trainer may lag behind
                # or be ahead.
                current = {"", trust_fingerprint(credentials.site_bundles_pem), self._trust}
                await self._probe_until(stopped, credentials.renewal_due_s(), current)
                if (renewed := await self._signed(stopped)) is not None:
                    key, signed = renewed
                    credentials.trust(signed.site_bundles_pem)
                    credentials.renew(key, signed.chain_pem)

    async def _signed(self, stopped: asyncio.Event) -> tuple[WorkerKey, SignedCertificate] | None:
        """A new key and its certificate; None if stopped first."""
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
    async def _uploading_log(self, credentials: WorkerCredentials) -> AsyncIterator[None]:
        """Within it, upload the trainer's log; at the end what is left of it."""
        if self._trainer_output is None or not self._config.keeper_address:
            yield
            return
        client = ArtifactClient(
            self._config.keeper_address,
            job=self._job.key,
            worker=self._identity,
            incarnation=0,  # a log may be that of a trainer without one
            credentials=credentials,
        )
        upload = LogUpload(client, self._config.rank, self._trainer_output)
        try:
            yield
        finally:
            await asyncio.to_thread(upload.close)

    @contextlib.asynccontextmanager
    async def _connected(self, credentials: WorkerCredentials) -> AsyncIterator[None]:
        service = MeasuringService(
            job=self._job, rank=self._config.rank, worker=self, credentials=credentials
        )
        port = await service.start(self._config.listen_host, preferred_port=self._preferred_port())
        self._port_file.write_text(f"{port}\n")
        endpoint = MeasuringEndpoint(join_host_port(self._config.advertise_host, port))
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._local.send(endpoint)
            _LOG.info("serving other sidecars at %s", endpoint.address)
        self._caller = PeerSidecarClient(
            job=self._job.key,
            rank=self._config.rank,
            worker=self,
            credentials=credentials,
            dial=lambda rank: self._config.link_address(rank, "measuring"),
            by_gateway=self._job.spec.network.exposure == "Gateway",
        )
        self._caller.set_peers(self._controller.peers)
        try:
            yield
        finally:
            caller, self._caller = self._caller, None
            await caller.close()
            await service.stop()

    @property
    def _port_file(self) -> Path:
        return Path(self._config.state_dir) / PORT_FILE

    def _preferred_port(self) -> int:
        """The configured port, else the port of this worker's earlier sidecar."""
        if self._config.measuring_port:
            return self._config.measuring_port
        try:
            text = self._port_file.read_text().strip()
        except OSError:
            return 0
        return int(text) if text.isdecimal() and 0 < int(text) < 65536 else 0

    async def _probe_until(
        self, stopped: asyncio.Event, seconds: float, current: Collection[str]
    ) -> None:
        """Probe idle links one at a time, until stopped, time is up, or the bundles changed."""
        end_s, ending = time.monotonic() + seconds, asyncio.create_task(stopped.wait())

        def may_probe() -> bool:
            return time.monotonic() < end_s and self._trust in current

        while not stopped.is_set() and may_probe():
            probing = asyncio.create_task(self._probe_due(may_probe))
            await asyncio.wait({probing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if stopped.is_set():  # the end of a pod does not wait for a peer that hangs
                probing.cancel()
                break
            probing.result()
            self._issue(self._controller.regroup_if_due(time.monotonic()))
            self._notify_peers()
            await asyncio.wait({ending}, timeout=PROBE_TICK_S)
        ending.cancel()

    async def _probe_due(self, may_probe: Callable[[], bool]) -> None:
        for _ in self._controller.peers:  # one that hangs is due again after its timeout
            if not (may_probe() and await self._probe_one()):
                break

    async def _probe_one(self) -> bool:
        """Probe one link; return whether one was due (each is due only once, so loops end)."""
        member = self._controller.link_to_probe(time.monotonic())
        if member is None or self._caller is None:
            return False
        rank = member.identity.rank
        try:
            busy_bytes, seconds = await self._caller.probe(member)
        except (UnavailableError, ContractError) as error:
            _LOG.info("%s", error)
            return True
        _LOG.info("link to %d alone: %.3g MB/s", rank, busy_bytes / seconds / 1e6)
        self._issue(self._controller.probed(rank, busy_bytes, seconds, time.monotonic()))
        return True

    # ---- metrics -------------------------------------------------------------------------------

    def _serve_metrics(self) -> MetricsServer:
        host, port = self._metrics_address
        registry = CollectorRegistry()
        registry.register(
            SidecarMetrics(
                job=self._job.key,
                site=self._identity.site,
                peer=self._job.worker,
                read=self._reading,
            )
        )
        ProcessCollector(registry=registry)
        server = serve_metrics(registry, host, port)
        _LOG.info("metrics at http://%s/metrics", join_host_port(host, server.server_port))
        return server

    def _reading(self) -> MetricsReading:
        controller = self._controller
        return MetricsReading(
            capacity=self.own(),
            directive=controller.directive,
            allowance=controller.allowance,
            steps=controller.steps_total,
            samples=controller.samples_total,
            iteration_s=controller.links.iteration_s(),
            trainer_connected=(connected := self._local.connected()),
            trainer_silent_s=time.monotonic() - self._heard_s if connected else None,
            step_seconds=self._step_seconds.main,
            exchange_thread_seconds=self._step_seconds.thread,
            link_bytes=tuple(self._link_bytes.rows()),
            connections=self._connections.sample(),
            refused=self._refusals.messages(),
            refusals=self._refusals.counts(),
            renewals=self._credentials.renewals,
            node=read_node_facts(self._machine_root),
            heat=None if self._heat is None else self._heat.decision,
            demand=None if self._demand is None else self._demand.decision,
            is_demand_blind=self._demand is not None and self._demand.is_blind,
        )

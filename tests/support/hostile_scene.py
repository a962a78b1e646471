"""A run of two sites as a target.

Plant-a has an operator, a trainer with its sidecar and a keeper, all as processes beside a real API
server. The test itself is plant-b, with its authority. The run waits for workers that never join,
so refusals must be reported without training.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from cluster_pods import ClusterPods
from dlion_api import cluster_names as names
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.protocol.refusals import REASON_KEY
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.wire import coordination_pb2, coordination_pb2_grpc
from dlion_operator.federation.reports import (
    ReportedWorkers,
    RunReport,
    SpecFingerprint,
    TrainingFigures,
)
from dlion_operator.pki.authority import CertificateAuthority, StoredAuthority
from dlion_operator.pki.certificate_issuer import Issuer
from dlion_worker.security.credentials import WorkerKey
from federated import FederatedSite
from local_run import job_document
from operator_process import OperatorProcess, free_ports
from podless_jobs import workers

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

Answer = TypeVar("Answer")
A, B = SiteName("plant-a"), SiteName("plant-b")
NAME = "test"
INCARNATION = 5
"""The incarnation of plant-b's worker, as its operator reports it."""
WITHIN_S = 20.0
NOWHERE = "127.0.0.1:9"


@dataclass(frozen=True)
class Proof:
    """A key and its certificate chain, PEM."""

    key_pem: bytes
    chain_pem: bytes


@dataclass(frozen=True)
class Ended:
    """How a call ended: its status, the reason in its trailing metadata, and its message."""

    code: grpc.StatusCode
    reason: str = ""
    words: str = ""


def of_worker(
    authority: CertificateAuthority,
    who: WorkerIdentity | KeeperIdentity,
    job: JobKey,
    *,
    now: datetime | None = None,
) -> Proof:
    """A certificate of that authority for a worker of any site."""
    key = WorkerKey()
    stored = authority.to_stored()
    signing = serialization.load_pem_private_key(stored.key_pem, password=None)
    certificate = x509.load_pem_x509_certificate(stored.certificate_pem)
    issuer = Issuer(signing, certificate)  # type: ignore[arg-type]  # EC, as the authority has it
    return Proof(key.pem(), issuer.sign(key.csr_pem(), who, job, site=who.site, now=now))


class Neighbour:
    """The federation part of plant-b's operator, in a thread."""

    def __init__(self, site: FederatedSite, other: FederatedSite) -> None:
        self.site = site
        self.other = other
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="neighbour")
        self._thread.start()

    def start(self) -> None:
        """Federate with plant-a."""
        self.do(self.site.start(self.other))

    def stop(self) -> None:
        """Release its port."""
        if self.site.node is not None:
            self.do(self.site.node.close())
            self.site.node = None

    def close(self) -> None:
        """Stop and remove everything."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, what: Coroutine[Any, Any, Answer]) -> Answer:
        """Run it in the thread and return its result."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(30)


@dataclass
class Scene:
    """The run with all its processes."""

    kubectl: Kubectl
    operator: OperatorProcess
    federation_port: int
    neighbour: Neighbour
    pods: ClusterPods
    authorities: dict[SiteName, CertificateAuthority]
    tokens: dict[str, str] = field(default_factory=dict)

    # ---- members ---------------------------------------------------------------------------------

    @property
    def job(self) -> JobKey:
        """The run."""
        return self.pods.job.key

    def worker(self, site: SiteName, index: int = 0) -> WorkerIdentity:
        """A worker of the run. Plant-a's 0 is the target; its 1 has joined and does not run."""
        found = self.pods.job.workers()
        return next(each for each in found if (each.site, each.index) == (site, index))

    @property
    def victim(self) -> WorkerIdentity:
        """The worker whose trainer and sidecar run."""
        return self.worker(A)

    def address_of(self, server: str) -> str:
        """The address of one of plant-a's servers: as the matrix names them, or `metrics`."""
        worker, keeper = (self.pods.address(host) for host in (1 + self.victim.rank, 101))
        return {
            "exchange": f"{worker}:{names.EXCHANGE_PORT}",
            "measuring": f"{worker}:{names.MEASURING_PORT}",
            "metrics": f"{worker}:{names.METRICS_PORT}",
            "keeper": f"{keeper}:{names.KEEPER_PORT}",
            "coordinator": self.operator.coordinator_address,
            "federation": f"127.0.0.1:{self.federation_port}",
        }[server]

    def token(self, index: int) -> str:
        """The token of the pod of plant-a's worker of that index, created once."""
        if str(index) not in self.tokens:
            self.tokens[str(index)] = self.pods.token_of(self.worker(A, index))
        return self.tokens[str(index)]

    # ---- plant-b's report ------------------------------------------------------------------------

    def say(self, exchange: str, measuring: str = NOWHERE) -> None:
        """Report, as plant-b's operator, that its worker runs."""
        worker = self.worker(B)
        member = Member(worker, INCARNATION, MemberState.READY, exchange, measuring)
        reported = ReportedWorkers((worker,), (member,), settled=True)
        report = RunReport(SpecFingerprint.of(self.pods.job), reported, TrainingFigures())
        self.neighbour.site.reports = {self.job: report}

    # ---- reports ---------------------------------------------------------------------------------

    def sidecar_metric(self, name: str) -> float:
        """The metric of the sidecar, as `OperatorProcess.metric`."""
        url = f"http://{self.address_of('metrics')}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        lines = re.findall(rf"^{re.escape(name)}(.*) (.+)$", text, flags=re.MULTILINE)
        return sum(float(value) for _, value in lines)

    def peer_refusals(self, port: str, side: str, reason: str) -> float:
        """The value of `dlion_peer_refusals_total` for those labels."""
        labels = f'job="{NAME}",namespace="{self.kubectl.namespace}",port="{port}"'
        place = f'{labels},reason="{reason}",side="{side}",site="{A}"'
        return self.sidecar_metric(f"dlion_peer_refusals_total{{{place}}}")

    def records(self) -> list[str]:
        """Messages of the run's events `MessageRefused`, from its keeper."""
        return [event.message for event in self.pods.events("MessageRefused")]

    def events(self, reason: str) -> list[str]:
        """Messages of the job's Kubernetes events with that reason."""
        found = self.kubectl.get("events")["items"]
        return [
            str(each["message"])
            for each in found
            if each["reason"] == reason and each["involvedObject"]["name"] == NAME
        ]

    def status_of_b(self) -> str:
        """The status of plant-b as plant-a reports it."""
        sites = (self.kubectl.get("dlj", NAME).get("status") or {}).get("sites") or ()
        return next((str(each.get("message", "")) for each in sites if each["name"] == B), "")


def until(look: Callable[[], Any], what: str, within_s: float = WITHIN_S) -> Any:
    """Return the result of `look` once it is true."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"timed out: {what}"
        time.sleep(0.1)
    return found


@contextmanager
def channel(
    address: str, root_pem: bytes | None, name: str, proof: Proof | None = None
) -> Iterator[grpc.Channel]:
    """A channel of a normal caller; plain text without `root_pem`."""
    options: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if root_pem is None:
        made = grpc.insecure_channel(address, options)
    else:
        key, chain = (proof.key_pem, proof.chain_pem) if proof else (None, None)
        credentials = grpc.ssl_channel_credentials(root_pem, key, chain)
        options.append(("grpc.ssl_target_name_override", name))
        made = grpc.secure_channel(address, credentials, options)
    with made:
        yield made


def ended(call: Callable[[], Any]) -> Ended:
    """Read a call to its end; return how it ended."""
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            for _ in answer:
                pass
    except grpc.RpcError as error:
        call_ended: Any = error  # it is a grpc.Call as well
        metadata = dict(call_ended.trailing_metadata() or ())
        words = call_ended.details() or ""
        return Ended(call_ended.code(), str(metadata.get(REASON_KEY, "")), words)
    return Ended(grpc.StatusCode.OK)


@contextmanager
def scene(kubectl: Kubectl, folder: Path) -> Iterator[Scene]:
    """Start the run; return once its trainer knows plant-b's worker."""
    port, port_b = free_ports(2)
    secret = f"authority-{kubectl.namespace}"
    settings = {
        "authority": {"secretName": secret},
        "federation": {"port": port},
        "sites": [
            {
                "name": str(B),
                "address": f"127.0.0.1:{port_b}",
                "bundleFile": str(folder / f"{B}.pem"),
            }
        ],
    }
    home = kubectl.namespace
    operator = OperatorProcess(
        folder, kubectl.kubeconfig, namespaces=(home,), namespace=home, settings=settings
    )
    with contextlib.ExitStack() as stack:
        b = FederatedSite(B, folder, port_b, CertificateAuthority(B))
        b.bundle_file.write_bytes(b.authority.bundle_pem)
        stack.enter_context(operator)
        a = FederatedSite(A, folder, port, _authority(kubectl, secret))
        a.bundle_file.write_bytes(a.authority.bundle_pem)
        kubectl.apply(job_document({A: 2, B: 1}, trainer={"stop": {"maxSteps": 10**6}}))
        until(lambda: len(workers(kubectl, NAME)) == 2, "the workers' pods", 60)
        keepers = "app.kubernetes.io/component=keeper"
        until(lambda: kubectl.get("pods", "-l", keepers)["items"], "the keeper's pod")
        pods = ClusterPods(folder, kubectl.get("dlj", NAME), kubectl, subnet=47)
        stack.callback(pods.close)
        neighbour = Neighbour(b, a)
        stack.callback(neighbour.close)
        authorities = {A: a.authority, B: b.authority}
        made = Scene(kubectl, operator, port, neighbour, pods, authorities)
        made.say(NOWHERE)
        neighbour.start()
        pods.start_keeper()
        pods.start_worker(made.victim.rank)
        stack.enter_context(_joined(made, made.worker(A, 1)))
        until(lambda: _is_known(made), f"the trainer serves, knows all\n{pods.story()}", 120)
        yield made


def _authority(kubectl: Kubectl, secret: str) -> CertificateAuthority:
    """Plant-a's own authority, as its operator stores it."""
    data = kubectl.get("secret", secret)["data"]
    key, certificate = (base64.b64decode(data[name]) for name in ("tls.key", "tls.crt"))
    return CertificateAuthority(A, stored=StoredAuthority(key, certificate))


@contextmanager
def _joined(at: Scene, worker: WorkerIdentity) -> Iterator[None]:
    """Join as that worker of plant-a would. It has no reachable address."""
    root = at.authorities[A].bundle_pem
    with channel(at.address_of("coordinator"), root, COORDINATOR_DNS_NAME) as made:
        stub = coordination_pb2_grpc.CoordinationStub(made)  # type: ignore[no-untyped-call]
        request = coordination_pb2.JoinRequest(
            token=at.token(worker.index),
            run=str(at.job),
            worker=wire_worker(worker),
            incarnation=INCARNATION,
            exchange_address=NOWHERE,
            measuring_address=NOWHERE,
            spec_hash=at.pods.job.hash(),
        )
        updates = stub.Join(request)
        next(iter(updates))
        yield


def _is_known(at: Scene) -> bool:
    """Whether the trainer knows both other workers, and its sidecar knows the trainer."""
    stored = at.pods.root(f"w{at.victim.rank}") / "var/lib/dlion/worker/membership.json"
    content = stored.read_text() if stored.exists() else ""
    return content.count(NOWHERE) >= 4 and at.sidecar_metric("dlion_trainer_connected_count") == 1


def wire_worker(worker: WorkerIdentity, **changes: Any) -> coordination_pb2.Worker:
    """The worker as the wire encodes it."""
    fields = {"rank": worker.rank, "site": worker.site, "group": worker.group}
    return coordination_pb2.Worker(**{**fields, "index": worker.index, **changes})


def other_rank(worker: WorkerIdentity) -> Rank:
    """A rank that no worker of the run has."""
    return Rank(worker.rank + 70)

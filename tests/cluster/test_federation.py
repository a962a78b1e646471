"""Test two federated operators and a third one, each with a real API server, over loopback.

All sites have the same manifest. Sites trust each other once their bundles are exchanged, without a
restart. Each site's status shows both, and one command reads both clusters. Workers authenticate
with their pods' tokens. From their own site they get the members and the bundles of both. By
exposure they reach the other site's workers at ports of nodes, of a load balancer, or at a gateway
with their routes. All of that is removed with the workers.

Other counts at one site are not drift and are adopted. A differing manifest is reported at all
three sites within ten seconds, and another image at one site is not drift. A killed operator is
reported missing, its reports are kept, and it is heard again after its return. `dlion trust revoke`
at a worker's own site reaches the workers of all three sites in ten seconds, and survives restarts
of operators. At another site it applies only there. `restore` lifts it. The test prints the times.

Left out: pods that run and train, links between machines; the test stands in for node, load
balancer and gateway.
"""

from __future__ import annotations

import base64
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import CertificateSigningRequestBuilder, Name

import route_kinds
from dlion_api.cluster_names import REVOKED_ANNOTATION, TOKEN_AUDIENCE
from dlion_api.names import JobKey, WorkerIdentity
from dlion_api.protocol.worker_config import COORDINATOR_DNS_NAME
from dlion_api.spec import load_job
from dlion_api.wire import coordination_pb2 as wire
from dlion_api.wire import coordination_pb2_grpc
from dlion_cli.__main__ import main
from manifest_table import smallest
from operator_process import OperatorProcess, free_ports
from several_contexts import SeveralContexts
from testbed.sites import Testbed

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
SITES = ("plant-a", "plant-b")
ALL_SITES = (*SITES, "plant-c")
DRIFT_WITHIN_S = 10.0
SERVICE_TYPES = {"NodePort": "NodePort", "LoadBalancer": "LoadBalancer", "Gateway": "ClusterIP"}
ROUTES: dict[str, dict[str, Any]] = {
    "plant-a": {"route": "TLSRoute", "parent": {"name": "edge", "namespace": "gateways"}},
    "plant-b": {"route": "IngressRouteTCP", "entryPoints": ["dlion"]},
    "plant-c": {"route": "TLSRoute", "parent": {"name": "edge", "namespace": "gateways"}},
}
"""The kind of route by which each site's gateway reaches workers."""


def gateway_of(site: str) -> str:
    """Return the address at which others reach its gateway."""
    return f"{site}.example:443"


@dataclass
class OperatedSite:
    """One site: its API server and its operator."""

    name: str
    kubectl: Kubectl
    operator: OperatorProcess
    bundle_file: Path
    """Where the other site reads this one's bundle."""

    def status(self) -> dict[str, Any]:
        return dict(self.kubectl.get("dlj", "digits").get("status") or {})

    def site(self, name: str) -> dict[str, Any]:
        """Return this site's status of that one."""
        return next((s for s in self.status().get("sites") or () if s["name"] == name), {})

    def consistent(self) -> tuple[str, str, str]:
        conditions = self.status().get("conditions") or ()
        found = next((c for c in conditions if c["type"] == "SpecConsistent"), {})
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    def bundle(self) -> bytes:
        secret = replace(self.kubectl, namespace="default").get("secret", self.authority_secret)
        return base64.b64decode(secret["data"]["tls.crt"])

    @property
    def authority_secret(self) -> str:
        return f"authority-{self.kubectl.namespace}"

    def pods(self) -> list[dict[str, Any]]:
        return list(self.kubectl.get("pods", "-l", "app.kubernetes.io/component=worker")["items"])

    @property
    def address(self) -> str:
        """Return the address of its node and of its load balancer."""
        return f"192.0.2.{1 + SITES.index(self.name)}"

    def place_pods(self) -> None:
        """In the kubelet's place, report that they are on a node."""
        status = {"status": {"hostIP": self.address, "hostIPs": [{"ip": self.address}]}}
        self._write_status("pod", self.pods(), status)

    def balance(self) -> None:
        """In the load balancer's place, report its address for the workers."""
        status = {"status": {"loadBalancer": {"ingress": [{"ip": self.address}]}}}
        self._write_status("service", self.exposed("LoadBalancer"), status)

    def _write_status(self, kind: str, found: list[dict[str, Any]], status: dict[str, Any]) -> None:
        for each in found:
            self.kubectl.run("patch", kind, each["metadata"]["name"], "--subresource=status",
                             "--type=merge", "-p", json.dumps(status))  # fmt: skip

    def exposed(self, exposure: str) -> list[dict[str, Any]]:
        """Return the workers' Services for that exposure, by name and so by index."""
        found = self.kubectl.get("services", "-l", "app.kubernetes.io/component=worker")["items"]
        ready = [each for each in found if each["spec"]["type"] == SERVICE_TYPES[exposure]]
        return sorted(ready, key=lambda each: str(each["metadata"]["name"]))

    def routes(self) -> list[dict[str, Any]]:
        """Return the routes of its gateway."""
        return list(self.kubectl.get("tlsroutes,ingressroutetcps")["items"])

    def far_addresses(self, exposure: str, index: int) -> tuple[str, ...]:
        """Return the addresses at which other sites reach that worker of its group."""
        if exposure == "Gateway":
            return (gateway_of(self.name),) * 2
        ports = self.exposed(exposure)[index]["spec"]["ports"]
        key = "nodePort" if exposure == "NodePort" else "port"
        return tuple(f"{self.address}:{port[key]}" for port in ports)

    def join(self, worker: WorkerIdentity, spec_hash: str) -> Joined:
        """Sign and join that worker as its pod does."""
        index = {"dlion.dev/group": worker.group,
                 "batch.kubernetes.io/job-completion-index": str(worker.index)}  # fmt: skip
        pod = next(p for p in self.pods() if index.items() <= p["metadata"]["labels"].items())
        token = self.kubectl.run(
            "create", "token", "default", f"--audience={TOKEN_AUDIENCE}",
            "--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}",
        ).strip()  # fmt: skip
        run = JobKey(self.kubectl.namespace, "digits", "1")
        return Joined(
            self.operator.coordinator_address, self.bundle(), run, worker, token, spec_hash
        )


class Joined:
    """A worker that joins and trains nothing."""

    def __init__(
        self,
        address: str,
        authority_pem: bytes,
        run: JobKey,
        worker: WorkerIdentity,
        token: str,
        spec_hash: str,
    ) -> None:
        options = (("grpc.ssl_target_name_override", COORDINATOR_DNS_NAME),)
        credentials = grpc.ssl_channel_credentials(authority_pem)
        self.channel = grpc.secure_channel(address, credentials, options=options)
        stub = coordination_pb2_grpc.CoordinationStub(self.channel)  # type: ignore[no-untyped-call]
        place = wire.Worker(
            rank=worker.rank, site=worker.site, group=worker.group, index=worker.index
        )
        who: dict[str, Any] = {"run": str(run), "worker": place, "token": token}
        signed = stub.Sign(wire.SignRequest(**who, role="trainer", csr_pem=csr_pem()), timeout=20)
        self.bundles = dict(signed.site_bundles_pem)
        request = wire.JoinRequest(
            **who,
            incarnation=1,
            exchange_address=f"10.0.0.{worker.rank}:7440",
            measuring_address=f"10.0.0.{worker.rank}:7441",
            spec_hash=spec_hash,
        )
        self._updates = stub.Join(request, timeout=120)

    def membership_of(self, count: int) -> Any:
        """Read the first membership with this many members."""
        return next(update for update in self._updates if len(update.members) == count)


def csr_pem() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    request = CertificateSigningRequestBuilder().subject_name(Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def control_planes(testbed_possible: None) -> Iterator[dict[str, Kubectl]]:
    """For each site an API server with the DLionJob definition and no kubelet."""
    with Testbed.up(name=f"f{os.getpid()}", sites=len(ALL_SITES), nodes=0) as made:
        there = ("site-a", "site-b", "site-c")
        found = dict(zip(ALL_SITES, (made.site(each).kubectl for each in there), strict=True))
        for kubectl in found.values():
            kubectl.run("apply", "-f", str(ROOT / "crds/dlionjob.yaml"))
            route_kinds.install(kubectl)
            eventually("DLionJobs are served", partial(kubectl.knows, "dlj"))
        yield found


@pytest.fixture
def sites(
    control_planes: dict[str, Kubectl], tmp_path: Path
) -> Iterator[tuple[OperatedSite, OperatedSite]]:
    """Two sites with their operators, which do not trust each other yet."""
    with _operated({name: control_planes[name] for name in SITES}, tmp_path) as made:
        yield made[0], made[1]


@pytest.fixture
def three_sites(
    control_planes: dict[str, Kubectl], tmp_path: Path
) -> Iterator[tuple[OperatedSite, OperatedSite, OperatedSite]]:
    """The same with a third site."""
    with _operated(control_planes, tmp_path) as made:
        yield made[0], made[1], made[2]


@contextmanager
def _operated(control_planes: dict[str, Kubectl], tmp_path: Path) -> Iterator[list[OperatedSite]]:
    namespace = f"dlion-test-{uuid.uuid4().hex[:8]}"
    made: list[OperatedSite] = []
    ports = dict(zip(control_planes, free_ports(len(control_planes)), strict=True))
    with ExitStack() as stack:
        for name, kubectl in control_planes.items():
            kubectl.run("create", "namespace", namespace)
            stack.callback(kubectl.run, "delete", "namespace", namespace, "--wait=false")
            (folder := tmp_path / name).mkdir()
            settings = {
                "authority": {"secretName": f"authority-{namespace}"},
                "federation": {"port": ports[name]},
                "gateway": {"address": gateway_of(name), **ROUTES[name]},
                "sites": [
                    {
                        "name": other,
                        "address": f"127.0.0.1:{ports[other]}",
                        "bundleFile": str(tmp_path / f"{other}.pem"),
                    }
                    for other in ports
                    if other != name
                ],
            }
            operator = OperatorProcess(
                folder, kubectl.kubeconfig, site=name, namespaces=(namespace,), settings=settings
            )
            stack.enter_context(operator)
            there = replace(kubectl, namespace=namespace)
            made.append(OperatedSite(name, there, operator, tmp_path / f"{name}.pem"))
        yield made
        for each in made:
            defects = each.operator.metric('dlion_operator_reconciles_total{result="defect"}')
            assert defects == 0, each.operator.last_log_lines()


GROUPS = [{"name": "small", "workers": 1}]


def manifest(seed: int = 1, **changes: Any) -> dict[str, Any]:
    document = smallest()
    document["metadata"] = {"name": "digits"}
    document["spec"]["sites"] = [
        {"name": "plant-a", "groups": [{"name": "small", "workers": 2}]},
        {"name": "plant-b", "groups": [{"name": "small", "workers": 1}]},
    ]
    document["spec"]["trainer"]["seed"] = seed
    document["spec"] |= changes
    return document


def eventually(what: str, look: Callable[[], Any], *, within_s: float = 30.0) -> Any:
    """Return the result of `look` once it is true."""
    began_s = time.monotonic()
    while not (found := look()):
        assert time.monotonic() - began_s < within_s, f"{what}: not within {within_s:g} s"
        time.sleep(0.2)
    print(f"{what}: {time.monotonic() - began_s:.1f} s")
    return found


def test_two_sites_show_the_whole_job(
    sites: tuple[OperatedSite, OperatedSite], tmp_path: Path
) -> None:
    a, b = sites
    for site in sites:
        site.kubectl.apply(manifest())
    eventually("both look", lambda: all(site.site(site.name) for site in sites))
    assert {site.consistent()[0] for site in sites} == {"Unknown"}
    for site in sites:
        site.bundle_file.write_bytes(site.bundle())
    eventually("all is consistent", lambda: {s.consistent()[0] for s in sites} == {"True"})
    eventually(
        "both start",
        lambda: all(s.site(n).get("state") == "Starting" for s in sites for n in SITES),
    )
    assert {site.status()["readyWorkers"] for site in sites} == {"0/3"}

    document = manifest()
    document["metadata"]["namespace"] = a.kubectl.namespace
    job = load_job(document).with_group_ranks()
    eventually("pods are made", lambda: [len(site.pods()) for site in sites] == [2, 1])
    by_name = {site.name: site for site in sites}
    joined = [by_name[worker.site].join(worker, job.hash()) for worker in job.workers()]
    for worker in joined:
        assert worker.bundles == {site.name: site.bundle() for site in sites}
        update = worker.membership_of(3)
        assert sorted(member.worker.site for member in update.members) == ["plant-a", *SITES]
        assert {member.state for member in update.members} == {"Ready"}
    eventually("all are ready", lambda: {s.status()["readySites"] for s in sites} == {"2/2"})
    assert {site.status()["readyWorkers"] for site in sites} == {"3/3"}

    _one_command_shows_both(a, b, tmp_path)
    _scaled_is_no_drift(a, b)
    _a_killed_operator_is_missed(a, b)
    for worker in joined:
        worker.channel.close()


def _one_command_shows_both(a: OperatedSite, b: OperatedSite, folder: Path) -> None:
    """Run `dlion get --contexts` with one file that has a context of each cluster."""
    both = SeveralContexts({site.name: site.kubectl for site in (b, a)}, folder)
    _, *rows = (line.split() for line in both.output("get", "digits"))
    assert [row[:2] for row in rows] == [["plant-b", "digits"], ["plant-a", "digits"]]
    assert all("3/3" in row for row in rows), rows


def _scaled_is_no_drift(a: OperatedSite, b: OperatedSite) -> None:
    shrunk = [{"op": "replace", "path": "/spec/sites/0/groups/0/workers", "value": 1}]
    a.kubectl.run("patch", "dlj", "digits", "--type=json", f"-p={json.dumps(shrunk)}")
    eventually("other counts are taken over", lambda: b.site("plant-a").get("workers") == 1)
    assert a.consistent()[0] == b.consistent()[0] == "True"


def _a_killed_operator_is_missed(a: OperatedSite, b: OperatedSite) -> None:
    b.operator.kill()
    eventually("it is missed", lambda: a.site("plant-b").get("state") == "Unreachable", within_s=45)
    assert a.site("plant-b")["readyWorkers"] == 1  # from its last report
    b.operator.start()
    eventually("it is heard again", lambda: a.site("plant-b").get("state") != "Unreachable")


def test_every_site_names_the_drifted_one(
    three_sites: tuple[OperatedSite, OperatedSite, OperatedSite],
) -> None:
    """An unchanged site that does not differ reports it, too. Fields that may differ between sites
    are not drift. Once the manifests are equal again, all sites are consistent.
    """
    a, b, c = three_sites

    def document(seed: int = 1, **trainer: Any) -> dict[str, Any]:
        made = manifest(seed, sites=[{"name": each, "groups": GROUPS} for each in ALL_SITES])
        made["spec"]["trainer"] |= trainer
        return made

    def verdicts() -> set[tuple[str, str, str]]:
        return {site.consistent() for site in three_sites}

    for site in three_sites:
        site.bundle_file.write_bytes(site.bundle())
        site.kubectl.apply(document())
    eventually("all is consistent", lambda: {each[0] for each in verdicts()} == {"True"})

    c.kubectl.run("delete", "dlj", "digits")
    c.kubectl.apply(document(image="registry.example/other:1"))
    eventually("it is looked at", lambda: c.status().get("observedGeneration") == 1)
    eventually("all are there", lambda: b.site("plant-c").get("state") != "Absent")
    time.sleep(DRIFT_WITHIN_S)
    assert {each[0] for each in verdicts()} == {"True"}

    b.kubectl.run("delete", "dlj", "digits")
    eventually("it is absent", lambda: a.site("plant-b").get("state") == "Absent")
    b.kubectl.apply(document(seed=7))
    words = (
        "the manifest of plant-b differs from that of plant-a in trainer.seed;"
        " apply the same manifest at every site"
    )
    eventually(
        "all name the drift",
        lambda: verdicts() == {("False", "SpecDiffers", words)},
        within_s=DRIFT_WITHIN_S,
    )
    eventually(
        "it is refused", lambda: all(s.site("plant-b").get("state") == "Refused" for s in (a, c))
    )
    eventually("so is the other", lambda: b.site("plant-a").get("state") == "Refused")

    def messages() -> list[str]:
        events = a.kubectl.get("events", "--field-selector=reason=SpecDiffers")["items"]
        return [event["message"] for event in events]

    assert eventually("an event of the drift", messages) == [words]
    b.kubectl.run("delete", "dlj", "digits")
    b.kubectl.apply(document())
    eventually("all is well", lambda: {each[0] for each in verdicts()} == {"True"})


@pytest.mark.parametrize("exposure", SERVICE_TYPES)
def test_workers_of_other_sites_have_the_addresses_of_their_exposure(
    sites: tuple[OperatedSite, OperatedSite], exposure: str
) -> None:
    exposed = manifest(network={"exposure": exposure})
    for site in sites:
        site.bundle_file.write_bytes(site.bundle())
        site.kubectl.apply(exposed)
    eventually("pods are made", lambda: [len(site.pods()) for site in sites] == [2, 1])
    eventually("so are Services", lambda: [len(s.exposed(exposure)) for s in sites] == [2, 1])
    for site in sites:
        site.place_pods()
        if exposure == "LoadBalancer":
            site.balance()
    if exposure == "Gateway":  # a TLSRoute has one backend, an IngressRouteTCP of a worker two
        eventually("and routes", lambda: [len(site.routes()) for site in sites] == [4, 1])

    namespace = sites[0].kubectl.namespace
    job = load_job({**exposed, "metadata": {"name": "digits", "namespace": namespace}})
    job = job.with_group_ranks()
    by_name = {site.name: site for site in sites}
    joined = {each: by_name[each.site].join(each, job.hash()) for each in job.workers()}
    for worker, stream in joined.items():
        members = {member.worker.rank: member for member in stream.membership_of(3).members}
        for other in job.workers():
            addresses = members[other.rank].exchange_address, members[other.rank].measuring_address
            near = f"10.0.0.{other.rank}:7440", f"10.0.0.{other.rank}:7441"
            far = by_name[other.site].far_addresses(exposure, other.index)
            assert addresses == (near if other.site == worker.site else far)
    for site in sites:
        site.kubectl.apply(manifest(network={"exposure": exposure}, suspend=True))
    for stream in joined.values():
        stream.channel.close()
    eventually("Services go", lambda: not any(site.exposed(exposure) for site in sites))
    eventually("routes go", lambda: not any(site.routes() for site in sites))


# ---- revocation ------------------------------------------------------------------------------

REVOKED_WITHIN_S = 10.0


class Listener:
    """A joined worker, and the newest membership that it received."""

    def __init__(self, joined: Joined) -> None:
        self.joined = joined
        self.call: Any = joined._updates
        self.latest: Any = next(self.call)

    def revoked(self) -> list[str]:
        """Return the names that no worker may accept, in its newest membership."""
        members = self.latest.members
        return [f"{m.worker.site}/{m.worker.group}-{m.worker.index}" for m in members if m.revoked]

    def hear(self) -> None:
        """Read the next membership."""
        self.latest = next(self.call)


def hear_until(listener: Listener, names: list[str], began_s: float) -> float:
    """Return the seconds until that worker has received exactly these revocations."""
    while listener.revoked() != names:
        listener.hear()
        assert time.monotonic() - began_s < REVOKED_WITHIN_S, listener.latest
    return time.monotonic() - began_s


def dlion(site: OperatedSite, *arguments: str) -> None:
    where = ["--kubeconfig", str(site.kubectl.kubeconfig), "-n", site.kubectl.namespace]
    assert main(["trust", *arguments, *where]) == 0


def test_a_revocation_reaches_all_sites_in_ten_seconds(
    three_sites: tuple[OperatedSite, OperatedSite, OperatedSite],
) -> None:
    a, b, c = three_sites
    document = manifest(sites=[{"name": each, "groups": GROUPS} for each in ALL_SITES])
    for site in three_sites:
        site.bundle_file.write_bytes(site.bundle())
        site.kubectl.apply(document)
    eventually("all is consistent", lambda: {s.consistent()[0] for s in three_sites} == {"True"})
    eventually("pods are made", lambda: all(len(site.pods()) == 1 for site in three_sites))
    document["metadata"]["namespace"] = a.kubectl.namespace
    job = load_job(document).with_group_ranks()
    by_name = {site.name: site for site in three_sites}
    workers = {worker.site: worker for worker in job.workers()}
    listeners = {
        name: Listener(by_name[name].join(worker, job.hash())) for name, worker in workers.items()
    }
    for listener in listeners.values():
        while len(listener.latest.members) < 3:
            listener.hear()

    began_s = time.monotonic()
    dlion(b, "revoke", "digits", "plant-b/small-0", "--reason", "stolen")
    for name in ("plant-a", "plant-c"):
        took_s = hear_until(listeners[name], ["plant-b/small-0"], began_s)
        print(f"a worker of {name} is informed after {took_s:.1f} s")
    list(listeners["plant-b"].call)  # its stream ends
    with pytest.raises(grpc.RpcError) as refused:
        b.join(workers[b.name], job.hash())  # type: ignore[index]
    assert dict(refused.value.trailing_metadata() or ())["dlion-reason"] == "Revoked"

    def statuses() -> list[list[tuple[str, str, bool]]]:
        found = [site.status().get("revoked") or [] for site in three_sites]
        return [[(e["name"], e["by"], e["effective"]) for e in each] for each in found]

    own = ("plant-b/small-0", "plant-b", True)
    eventually("every status has it", lambda: statuses() == [[own]] * 3)
    assert b.kubectl.get("dlj", "digits")["status"]["revoked"][0]["reason"] == "stolen"
    events = b.kubectl.get("events", "--field-selector=reason=WorkerRevoked")["items"]
    assert len(events) == 1

    _another_site_decides_for_itself(three_sites, listeners, statuses, own)
    for site in (b, c):
        site.operator.kill()
        site.operator.start()
    eventually("it is kept", lambda: statuses()[1:] == [[own]] * 2)

    dlion(b, "restore", "digits", "plant-b/small-0")
    began_s = time.monotonic()
    hear_until(listeners["plant-a"], [], began_s)
    eventually("it is lifted everywhere", lambda: statuses() == [[]] * 3)
    again = replace(workers[b.name])  # type: ignore[index]
    Listener(b.join(again, job.hash())).joined.channel.close()
    for listener in listeners.values():
        listener.joined.channel.close()


def _another_site_decides_for_itself(
    three_sites: tuple[OperatedSite, OperatedSite, OperatedSite],
    listeners: dict[Any, Listener],
    statuses: Callable[[], Any],
    own: tuple[str, str, bool],
) -> None:
    a, _, c = three_sites
    dlion(a, "revoke", "digits", "plant-c")
    began_s = time.monotonic()
    hear_until(listeners["plant-a"], ["plant-b/small-0", "plant-c/small-0"], began_s)
    there, elsewhere = ("plant-c", "plant-a", True), ("plant-c", "plant-a", False)
    eventually(
        "the others show it",
        lambda: statuses() == [[own, there], [own, elsewhere], [own, elsewhere]],
    )
    assert listeners["plant-c"].revoked() == ["plant-b/small-0"]
    annotation = json.dumps([{"name": "../x"}, {"name": "plant-c"}])
    a.kubectl.run("annotate", "dlj", "digits", "--overwrite", f"{REVOKED_ANNOTATION}={annotation}")
    message = "annotation dlion.dev/revoked"
    eventually(
        "what is wrong is in the status",
        lambda: any(message in str(e.get("message")) for e in a.status().get("conditions") or ()),
    )
    assert statuses()[0] == [own, there]
    a.kubectl.run("annotate", "dlj", "digits", f"{REVOKED_ANNOTATION}-")
    eventually("it is lifted", lambda: statuses() == [[own]] * 3)
    assert c.status().get("revoked")

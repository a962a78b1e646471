"""Workers of two sites train together by each exposure, behind firewalls that let in what
docs/several-sites.md says, and nothing else.

Proves, with the chart and real pods, on sites whose pods do not reach each other (but in the last
part): through one port of a gateway, operators too, which HAProxy serves as the cluster's own
TLSRoutes (at one site) or IngressRouteTCPs (at the other) say, by ports of nodes, by ports of a
load balancer, and over a network that joins the pods, the job trains in lock step. Each site's
status shows both sites' workers and all links; nobody tries another port of the other site; of a
site with a gateway no other one takes a connection; what leads to workers goes with them; neither
operator asked for what the chart does not grant. Where a firewall is not opened, events name the
address that is not reached, the job is Stalled after five minutes, and trains once it is. Prints
how long it took. All of it is slow: in `make test` workers exchange messages through a gateway
(tests/local/test_gateway), and operators have routes made and deleted (test_federation).
What stands for load balancer and gateway: tests/support, testbed/load_balancer.py, site_gateway.py.
Left out: clouds' load balancers, other proxies, network policies.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

import route_kinds
from dlion_api.cluster_names import EXCHANGE_PORT, MEASURING_PORT
from dlion_api.spec import Job, load_job
from installed_sites import AT_NODES, FEDERATION_PORT, JOBS, InstalledSites
from several_contexts import ended
from site_gateway import ENTRY_POINT, PARENT, PORT, SiteGateway
from testbed.firewall import Firewall, Opening, open_ports
from testbed.layout import API_PORT
from testbed.load_balancer import balance
from trained_jobs import eventually, iteration, manifest, mostly_waiting, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from testbed.kubectl import Kubectl
    from testbed.sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]

NODE_PORTS = (30000, 32767)
ITERATIONS = 10
"""Each takes gradients of all workers."""
TRAINING = [("Training", "2/2", "3/3", 4), ("Training", "2/2", "3/3", 2)]
"""What the sites' statuses say then. A site tells of the links of its own workers."""
WORKERS = ("-l", "app.kubernetes.io/component=worker")
STREAMS = (("watch", "digits", "-o", "json"), ("logs", "digits", "--follow"))
"""What is asked of both clusters with one command, until the run ends."""
GATEWAYS: Mapping[str, dict[str, Any]] = {
    "site-a": {"route": "TLSRoute", "parent": PARENT},
    "site-b": {"route": "IngressRouteTCP", "entryPoints": [ENTRY_POINT]},
}


@dataclass
class TwoSites(InstalledSites):
    """Separate sites, each with a firewall against the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gateways = {s.name: SiteGateway(s, self.folder / s.name) for s in self.sites}
        self.operators_come_in: dict[str, Opening] = {}

    def federate(self) -> None:
        """Operators hear each other: as they do, if they do, else at ports of nodes."""
        if not self.operators_come_in:
            self._federate(AT_NODES, FEDERATION_PORT)

    def federate_by_gateways(self) -> None:
        """They do so through the one port of each site's gateway."""
        for site in self.sites:
            site.kubectl.apply(*self.gateways[site.name].documents())
            self.gateways[site.name].take_up()
        own = {
            name: {"gateway": {"address": each.address, **GATEWAYS[name]}}
            for name, each in self.gateways.items()
        }
        self._federate({"federation": {"service": {"type": "ClusterIP"}}}, PORT, own)

    def _federate(
        self, values: Mapping[str, Any], port: int, own: Mapping[str, Any] | None = None
    ) -> None:
        nodes = self.trust_each_other(values, port, own)
        self.operators_come_in = {
            name: Opening(f"{address}/32", port, port) for name, address in nodes.items()
        }

    @contextmanager
    def job(
        self, exposure: str, opening: Callable[[Site], Opening], *, max_seconds: int = 120
    ) -> Iterator[None]:
        """A job of two workers and one that trains, while each site takes connections of the other
        to that opening, and to where operators come in; deleted at the end."""
        firewalls = self.open(opening)
        with self.applied(exposure, max_seconds=max_seconds):
            self.wait_for_training(exposure)
            taken = [firewall.taken_bytes()[0] for firewall in firewalls]
            print(f"{exposure}: bytes that came in to each site's workers: {taken}")
            assert all(taken)
            assert [firewall.refused() for firewall in firewalls] == [0, 0]
            yield

    def open(self, opening: Callable[[Site], Opening] | None) -> list[Firewall]:
        """Each site takes connections of the other to that, and to where operators come in."""
        firewalls = [Firewall(site.layout) for site in self.sites]
        for site, firewall in zip(self.sites, firewalls, strict=True):
            workers = [opening(site)] if opening else []
            firewall.open(*workers, self.operators_come_in[site.name])
        return firewalls

    @contextmanager
    def applied(self, exposure: str, *, max_seconds: int) -> Iterator[None]:
        """That job at both sites; deleted at the end."""
        began_s = time.monotonic()
        try:
            for kubectl in self.jobs:
                kubectl.apply(*_documents(exposure, max_seconds))
            yield
        finally:
            for kubectl in self.jobs:
                kubectl.run("delete", "dlj", "digits", "--wait=false", "--ignore-not-found")
            kinds = "pods,services,tlsroutes,ingressroutetcps"
            eventually(
                lambda: not any(kubectl.get(kinds)["items"] for kubectl in self.jobs),
                within_s=120,
                what="nothing left",
            )
            print(f"{exposure}: gone after {time.monotonic() - began_s:.0f} s")

    def wait_for_training(self, exposure: str) -> None:
        """Each site says so of both, and all workers take steps together."""
        began_s = time.monotonic()
        eventually(lambda: self._shown(exposure) == TRAINING, within_s=240, what=exposure)
        print(f"{exposure}: trains after {time.monotonic() - began_s:.0f} s")
        for kubectl in self.jobs:
            names = {site["name"]: site["state"] for site in status_of(kubectl)["sites"]}
            assert names == {site.name: "Ready" for site in self.sites}
        eventually(
            lambda: all(iteration(kubectl) >= ITERATIONS for kubectl in self.jobs),
            what=f"{ITERATIONS} iterations",
        )

    def _shown(self, exposure: str) -> list[tuple[str, str, str, int]]:
        """What each site's status says of the whole job, once load balancers and gateways have
        done their part for what there is by now."""
        for site in self.sites:
            if exposure == "LoadBalancer":
                balance(site)
            if self.operators_come_in[site.name].first == PORT:
                self.gateways[site.name].take_up()
        return [_shown(kubectl) for kubectl in self.jobs]


@pytest.fixture(scope="module")
def two_sites(
    testbed_possible: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoSites]:
    """Both know the kinds of routes; their operators have made their authorities."""
    assert testbed_possible is None
    folder = tmp_path_factory.mktemp("sites")
    with TwoSites.up(f"e{os.getpid()}", folder, flat=False, prepare=route_kinds.install) as made:
        yield made


def _documents(exposure: str, max_seconds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A program, and its job with two workers at the first site, one at the second."""
    document = manifest({"small": 500}, workers=2, network={"exposure": exposure})
    (alone,) = manifest({"small": 500})["spec"]["sites"]
    document["spec"]["sites"].append(alone | {"name": "site-b"})
    document["spec"]["trainer"]["stop"] = {"maxSeconds": max_seconds}
    return mostly_waiting(document)


def _shown(kubectl: Kubectl) -> tuple[str, str, str, int]:
    status = status_of(kubectl)
    connected = (status.get("links") or {}).get("connected", 0)
    return (
        status.get("state", ""),
        status.get("readySites", ""),
        status.get("readyWorkers", ""),
        connected,
    )


def _standing(kubectl: Kubectl) -> tuple[str, str]:
    """Why the job is as it is, and whether somebody has to help."""
    conditions = {each["type"]: each for each in status_of(kubectl).get("conditions", ())}
    return conditions["Ready"]["reason"], conditions["Stalled"]["status"]


def _told(kubectl: Kubectl, reason: str) -> str:
    """What the job's events of that reason say."""
    events = kubectl.get("events", "--field-selector", f"reason={reason}")["items"]
    return "\n".join(event["message"] for event in events)


def _ports_of_nodes(site: Site) -> Opening:
    return Opening(f"{site.nodes[0].layout.address}/32", *NODE_PORTS)


def _service_types(kubectl: Kubectl, *chosen: str) -> set[str]:
    return {each["spec"]["type"] for each in kubectl.get("services", *chosen)["items"]}


def _job() -> Job:
    _, document = _documents("Gateway", 1)
    document["metadata"]["namespace"] = JOBS
    return load_job(document).with_group_ranks()


def _check_watched(lines: list[str]) -> None:
    """Both sites' documents, each to the end of the run."""
    states: dict[str, list[str]] = {}
    for line in lines:
        one = json.loads(line)
        states.setdefault(one["context"], []).append(one["job"]["status"]["state"])
    assert {site: each[-1] for site, each in states.items()} == dict.fromkeys(GATEWAYS, "Succeeded")
    assert all(each[0] == "Training" for each in states.values()), states


def _check_followed(lines: list[str]) -> None:
    """Each line bears its cluster and its worker, and all workers have some."""
    workers = {line.split(" | ")[0].strip() for line in lines}
    assert workers == {"site-a/small-0", "site-a/small-1", "site-b/small-0"}, lines[:20]


def test_by_ports_of_nodes(two_sites: TwoSites) -> None:
    two_sites.federate()
    with two_sites.job("NodePort", _ports_of_nodes, max_seconds=60), ExitStack() as stack:
        watched, followed = (
            stack.enter_context(two_sites.contexts.started(*words)) for words in STREAMS
        )
        for kubectl in two_sites.jobs:
            assert _service_types(kubectl, *WORKERS) == {"NodePort"}
        for kubectl in two_sites.jobs:
            kubectl.wait("--for=condition=Succeeded", "dlj/digits", timeout_s=240)
        _check_watched(ended(watched, within_s=60))
        _check_followed(ended(followed, within_s=60))
        eventually(
            lambda: not any(_service_types(kubectl, *WORKERS) for kubectl in two_sites.jobs),
            what="ports gone",
        )
    two_sites.check_rights()


def test_ports_that_are_closed_are_told_and_training_begins_once_they_are_open(
    two_sites: TwoSites,
) -> None:
    two_sites.federate()
    firewalls = two_sites.open(None)
    with two_sites.applied("NodePort", max_seconds=60):
        began_s = time.monotonic()
        nodes = [site.nodes[0].layout.address for site in two_sites.sites]
        for kubectl, other in zip(two_sites.jobs, nodes[::-1], strict=True):
            where = f"(not reached at {other}:"
            eventually(lambda k=kubectl, w=where: w in _told(k, "PeersUnreached"), within_s=240)
            print(
                f"told after {time.monotonic() - began_s:.0f} s: {_told(kubectl, 'PeersUnreached')}"
            )
        assert all(firewall.refused() for firewall in firewalls)
        stuck = [("NotLinked", "True")] * 2
        eventually(lambda: [*map(_standing, two_sites.jobs)] == stuck, within_s=420)
        print(f"stalled after {time.monotonic() - began_s:.0f} s")
        two_sites.open(_ports_of_nodes)
        two_sites.wait_for_training("NodePort")
    two_sites.check_rights()


def test_by_a_load_balancer(two_sites: TwoSites) -> None:
    """All workers of a site share its address."""
    two_sites.federate()

    def ports_of_the_load_balancer(site: Site) -> Opening:
        return Opening(f"{site.layout.load_balancer}/32", *NODE_PORTS)

    with two_sites.job("LoadBalancer", ports_of_the_load_balancer):
        for kubectl in two_sites.jobs:
            assert _service_types(kubectl, *WORKERS) == {"LoadBalancer"}
    two_sites.check_rights()


def _dns_pod(site: Site) -> str:
    """The address of a pod there that answers at port 53."""
    chosen = ("pods", "-l", "k8s-app=kube-dns")
    (pod,) = replace(site.kubectl, namespace="kube-system").get(*chosen)["items"]
    return str(pod["status"]["podIP"])


def test_through_one_port_of_each_site(two_sites: TwoSites) -> None:
    for site, other in (two_sites.sites, two_sites.sites[::-1]):
        assert open_ports(site.layout, _dns_pod(site), [53]) == {53}
        assert not open_ports(other.layout, _dns_pod(site), [53])
    two_sites.federate_by_gateways()
    job = _job()
    with two_sites.job("Gateway", lambda site: two_sites.operators_come_in[site.name]):
        _check_followed(two_sites.contexts.output("logs", "digits", "--tail", "2"))
        for site, other in (two_sites.sites, two_sites.sites[::-1]):
            assert _service_types(site.kubectl, "--all-namespaces") == {"ClusterIP"}
            taken = two_sites.gateways[site.name].taken_bytes()
            print(f"{site.name}: bytes that came in by name: {taken}")
            for worker in job.workers():
                if worker.site == site.name:
                    assert taken[worker.dns_name(job.key)]
                    assert taken[worker.measuring_dns_name(job.key)]
            node = site.nodes[0].layout.address
            assert open_ports(other.layout, node, range(1, 65536)) == {PORT}
            assert not open_ports(other.layout, site.layout.address, [API_PORT])
    two_sites.check_rights()


def test_over_a_network_that_joins_the_pods(two_sites: TwoSites) -> None:
    two_sites.federate()
    two_sites.testbed.join_pods()

    def ports_of_pods(site: Site) -> Opening:
        return Opening(site.layout.pod_network, EXCHANGE_PORT, MEASURING_PORT)

    with two_sites.job("PodNetwork", ports_of_pods):
        for kubectl in two_sites.jobs:
            assert not _service_types(kubectl, *WORKERS)
    two_sites.check_rights()

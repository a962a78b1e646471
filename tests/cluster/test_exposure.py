"""Test that workers of two sites train together by each exposure, behind firewalls.

The firewalls admit only what docs/several-sites.md lists. The chart and the pods are real, on sites
whose pods do not reach each other except in the last test. The exposures are: one port of a
gateway, also for operators; ports of nodes; ports of a load balancer; a network that joins the
pods. HAProxy serves the gateway by the cluster's own TLSRoutes at one site, and IngressRouteTCPs at
the other.

The job trains in lock step. Each site's status shows both sites' workers and all links. No process
tries another port of the other site, and a site with a gateway accepts no other connection. Routes
and Services of workers are removed with them. Neither operator makes a request that the chart does
not grant. While a firewall is closed, events name the unreachable address. The job is Stalled after
five minutes, and trains once the firewall opens. The test prints the times.

All of it is slow. In `make test` workers exchange messages through a gateway
(tests/local/test_gateway), and operators create and delete routes (test_federation). Stand-ins for
load balancer and gateway: tests/support, testbed/load_balancer.py, site_gateway.py. Left out:
clouds' load balancers, other proxies, network policies.
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
"""Each applies gradients of all workers."""
TRAINING = [("Training", "2/2", "3/3", 4), ("Training", "2/2", "3/3", 2)]
"""The sites' statuses then. A site reports the links of its own workers."""
WORKERS = ("-l", "app.kubernetes.io/component=worker")
STREAMS = (("watch", "digits", "-o", "json"), ("logs", "digits", "--follow"))
"""Commands that follow both clusters until the run ends."""
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
        """Connect the operators: as before if they are connected, else at ports of nodes."""
        if not self.operators_come_in:
            self._federate(AT_NODES, FEDERATION_PORT)

    def federate_by_gateways(self) -> None:
        """Connect the operators through the one port of each site's gateway."""
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
        """Run a job of two workers and one until it trains; delete it at the end.

        Each site admits connections of the other to that opening and to the operators' ports.
        """
        firewalls = self.open(opening)
        with self.applied(exposure, max_seconds=max_seconds):
            self.wait_for_training(exposure)
            taken = [firewall.taken_bytes()[0] for firewall in firewalls]
            print(f"{exposure}: bytes received by each site's workers: {taken}")
            assert all(taken)
            assert [firewall.refused() for firewall in firewalls] == [0, 0]
            yield

    def open(self, opening: Callable[[Site], Opening] | None) -> list[Firewall]:
        """Let each site admit the other's connections to that opening and to operators."""
        firewalls = [Firewall(site.layout) for site in self.sites]
        for site, firewall in zip(self.sites, firewalls, strict=True):
            workers = [opening(site)] if opening else []
            firewall.open(*workers, self.operators_come_in[site.name])
        return firewalls

    @contextmanager
    def applied(self, exposure: str, *, max_seconds: int) -> Iterator[None]:
        """Apply that job at both sites; delete it at the end."""
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
            print(f"{exposure}: removed after {time.monotonic() - began_s:.0f} s")

    def wait_for_training(self, exposure: str) -> None:
        """Wait until each site reports it of both, and all workers take steps together."""
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
        """Return each site's status of the whole job, once load balancers and gateways have applied
        the present objects.
        """
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
    """Two sites with the kinds of routes, whose operators have created their authorities."""
    assert testbed_possible is None
    folder = tmp_path_factory.mktemp("sites")
    with TwoSites.up(f"e{os.getpid()}", folder, flat=False, prepare=route_kinds.install) as made:
        yield made


def _documents(exposure: str, max_seconds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a program, and its job with two workers at the first site, one at the second."""
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
    """Return the reason of the job's state, and whether it is Stalled."""
    conditions = {each["type"]: each for each in status_of(kubectl).get("conditions", ())}
    return conditions["Ready"]["reason"], conditions["Stalled"]["status"]


def _messages_of(kubectl: Kubectl, reason: str) -> str:
    """Return the messages of the job's events of that reason."""
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
    """Check the documents of both sites, each to the end of the run."""
    states: dict[str, list[str]] = {}
    for line in lines:
        one = json.loads(line)
        states.setdefault(one["context"], []).append(one["job"]["status"]["state"])
    assert {site: each[-1] for site, each in states.items()} == dict.fromkeys(GATEWAYS, "Succeeded")
    assert all(each[0] == "Training" for each in states.values()), states


def _check_followed(lines: list[str]) -> None:
    """Check that each line names its cluster and worker, and that all workers have lines."""
    workers = {line.split(" | ")[0].strip() for line in lines}
    assert workers == {"site-a/small-0", "site-a/small-1", "site-b/small-0"}, lines[:20]


def test_workers_train_by_ports_of_nodes(two_sites: TwoSites) -> None:
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


def test_closed_ports_are_reported_and_training_begins_once_open(
    two_sites: TwoSites,
) -> None:
    two_sites.federate()
    firewalls = two_sites.open(None)
    with two_sites.applied("NodePort", max_seconds=60):
        began_s = time.monotonic()
        nodes = [site.nodes[0].layout.address for site in two_sites.sites]
        for kubectl, other in zip(two_sites.jobs, nodes[::-1], strict=True):
            where = f"(not reached at {other}:"
            eventually(
                lambda k=kubectl, w=where: w in _messages_of(k, "PeersUnreached"), within_s=240
            )
            reported_s = time.monotonic() - began_s
            print(f"reported after {reported_s:.0f} s: {_messages_of(kubectl, 'PeersUnreached')}")
        assert all(firewall.refused() for firewall in firewalls)
        stuck = [("NotLinked", "True")] * 2
        eventually(lambda: [*map(_standing, two_sites.jobs)] == stuck, within_s=420)
        print(f"stalled after {time.monotonic() - began_s:.0f} s")
        two_sites.open(_ports_of_nodes)
        two_sites.wait_for_training("NodePort")
    two_sites.check_rights()


def test_workers_train_by_a_load_balancer(two_sites: TwoSites) -> None:
    """All workers of a site share its address."""
    two_sites.federate()

    def ports_of_the_load_balancer(site: Site) -> Opening:
        return Opening(f"{site.layout.load_balancer}/32", *NODE_PORTS)

    with two_sites.job("LoadBalancer", ports_of_the_load_balancer):
        for kubectl in two_sites.jobs:
            assert _service_types(kubectl, *WORKERS) == {"LoadBalancer"}
    two_sites.check_rights()


def _dns_pod(site: Site) -> str:
    """Return the address of a pod there that answers at port 53."""
    chosen = ("pods", "-l", "k8s-app=kube-dns")
    (pod,) = replace(site.kubectl, namespace="kube-system").get(*chosen)["items"]
    return str(pod["status"]["podIP"])


def test_workers_train_through_one_port_of_each_site(two_sites: TwoSites) -> None:
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
            print(f"{site.name}: bytes received by name: {taken}")
            for worker in job.workers():
                if worker.site == site.name:
                    assert taken[worker.dns_name(job.key)]
                    assert taken[worker.measuring_dns_name(job.key)]
            node = site.nodes[0].layout.address
            assert open_ports(other.layout, node, range(1, 65536)) == {PORT}
            assert not open_ports(other.layout, site.layout.address, [API_PORT])
    two_sites.check_rights()


def test_workers_train_over_a_network_that_joins_the_pods(two_sites: TwoSites) -> None:
    two_sites.federate()
    two_sites.testbed.join_pods()

    def ports_of_pods(site: Site) -> Opening:
        return Opening(site.layout.pod_network, EXCHANGE_PORT, MEASURING_PORT)

    with two_sites.job("PodNetwork", ports_of_pods):
        for kubectl in two_sites.jobs:
            assert not _service_types(kubectl, *WORKERS)
    two_sites.check_rights()

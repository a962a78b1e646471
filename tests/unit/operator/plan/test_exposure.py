"""Test the Services and routes that expose workers to other sites.

- An exposed worker has its own Service that selects only its pod. It has one only if there are
  other sites and while the worker is not queued.
- Other sites get the ports that the API server chose: at the node of the newest pod, at the load
  balancer, or at the site's advertised address. A gateway gets one name for each port.
- Workers of this site keep the addresses of their pods. An unreachable worker is not published; the
  status states why.
- A Service ends once no worker uses it.

Left out: that an API server accepts these objects, and that a node or a gateway serves them
(tests/cluster, tests/local/test_gateway.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlion_api import cluster_names as names
from dlion_api.names import SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.spec import load_job
from dlion_operator.coordinator import CoordinatorServer
from dlion_operator.coordinator.events import JoinRequested
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.settings import Gateway, GatewayListenerSettings, LoadBalancer, Settings
from dlion_operator.model.workload_view import QueueState
from dlion_operator.pki.authority import CertificateAuthority, Tokens
from dlion_operator.pki.token_bindings import Bearer
from dlion_operator.plan.decisions import Apply, Decision, Delete, OpenRun
from dlion_operator.plan.objects.exposure import Addresses, WorkerAddresses, advertised_members
from dlion_operator.plan.observed import RunView
from dlion_operator.served_runs.site_runs import SiteRuns
from operator_world import SETTINGS, World, condition_statuses, dlion_job, ready_reason, stamp

A, B = SiteName("plant-a"), SiteName("plant-b")
NODE = "192.0.2.7"


def world(
    exposure: str = "NodePort", *, workers: int = 2, settings: Settings = SETTINGS, **spec: Any
) -> World:
    """Return a job with this many workers here and one at plant B."""
    sites = [
        {"name": A, "groups": [{"name": "small", "workers": workers}]},
        {"name": B, "groups": [{"name": "small", "workers": 1}]},
    ]
    return World(dlion_job(**{"sites": sites, "network": {"exposure": exposure}, **spec}), settings)


def running(**given: Any) -> World:
    """Return the same world with its pods on a node and its Services."""
    made = world(**given)
    made.expose(made.look())
    made.make_jobs()
    for pod in made.pods.values():
        pod["status"]["hostIP"] = NODE
    return made


def balanced(**given: Any) -> World:
    """Return a world with exposure LoadBalancer whose ports the API server has chosen."""
    return running(exposure="LoadBalancer", **given)


def services(decision: Decision) -> list[dict[str, Any]]:
    """Return the Services of workers."""
    found = [a.document for a in decision.actions if isinstance(a, Apply)]
    return [each for each in found if names.GROUP_LABEL in each["metadata"]["labels"]]


def deleted(decision: Decision) -> list[str]:
    """Return the names of deleted Services."""
    gone = [a for a in decision.actions if isinstance(a, Delete) and a.uid]
    return [each.name for each in gone if each.kind is Kind.SERVICE]


def opened(decision: Decision) -> Addresses | None:
    (run,) = [action for action in decision.actions if isinstance(action, OpenRun)]
    return run.addresses


def by_index(decision: Decision) -> dict[int, str]:
    return {worker.index: each.exchange for worker, each in (opened(decision) or {}).items()}


# ---- the Services ------------------------------------------------------------------------------


def test_a_worker_gets_a_service_that_selects_only_its_pod() -> None:
    at = running(workers=3)
    made = services(at.look())
    assert len(made) == 3
    for index, service in enumerate(made):
        assert service["spec"]["type"] == "NodePort"
        selector = service["spec"]["selector"]
        chosen = [
            name
            for name, pod in at.pods.items()
            if selector.items() <= pod["metadata"]["labels"].items()
        ]
        assert chosen == [f"small-{index}"]
        assert [p["port"] for p in service["spec"]["ports"]] == [7440, 7441]
        assert len(service["metadata"]["name"]) <= 63
        (owner,) = service["metadata"]["ownerReferences"]
        assert owner["uid"] == "u-1"


def test_a_queued_worker_holds_no_ports() -> None:
    at = world()
    at.document["metadata"]["labels"] = {names.QUEUE_LABEL: "edge"}
    at.queue = QueueState()
    assert services(at.look()) == []
    at.make_jobs()
    pods, at.pods = at.pods, {}
    assert services(at.look()) == []
    spec = at.jobs["small"]["spec"]
    spec["suspend"] = False
    admitted = at.look()
    assert len(services(admitted)) == 2
    at.expose(admitted)
    at.pods = pods
    spec["suspend"] = True
    assert deleted(at.look()) == [], "the pods still run"
    for pod in pods.values():
        pod["status"] = {"phase": "Failed"}
    preempted = at.look()
    assert deleted(preempted) == [each["metadata"]["name"] for each in at.services]
    assert services(preempted) == []


def test_names_fit_for_every_valid_manifest() -> None:
    document = dlion_job()
    document["metadata"]["name"] = "j" * 32
    name = names.worker_service_name(load_job(document).key, "g" * 16, 998)
    assert len(name) <= 63


@pytest.mark.parametrize(
    "at",
    [
        world("PodNetwork"),
        World(dlion_job(network={"exposure": "NodePort"})),
    ],
    ids=["on a network of pods", "without other sites"],
)
def test_there_are_no_services_without_other_sites(at: World) -> None:
    decision = at.look()
    assert services(decision) == []
    assert opened(decision) is None


# ---- the gateway -------------------------------------------------------------------------------

GATE = Gateway(
    address="plant-a.example:443", parent=GatewayListenerSettings(name="edge", namespace="gateways")
)
TRAEFIK = replace(GATE, route="IngressRouteTCP", entry_points=("dlion",))


def routed(gateway: Gateway | None) -> World:
    """Return two workers with Services behind this gateway."""
    return running(exposure="Gateway", settings=replace(SETTINGS, gateway=gateway))


def routes(decision: Decision) -> list[dict[str, Any]]:
    found = [a.document for a in decision.actions if isinstance(a, Apply)]
    return [each for each in found if each["kind"] not in ("Service", "Deployment")]


def test_every_port_behind_a_gateway_has_its_own_name() -> None:
    at = routed(GATE)
    decision = at.look()
    assert {each["spec"]["type"] for each in services(decision)} == {"ClusterIP"}
    leads: dict[str, tuple[str, int]] = {}
    for route in routes(decision):
        assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
        assert route["spec"]["parentRefs"] == [{"name": "edge", "namespace": "gateways"}]
        (host,), (rule,) = route["spec"]["hostnames"], route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        leads[host] = (backend["name"], backend["port"])
        (owner,) = route["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Service", backend["name"])
    assert leads == expected_leads(at)
    addresses = opened(decision) or {}
    assert {each.exchange for each in addresses.values()} == {GATE.address}
    assert {each.measuring for each in addresses.values()} == {GATE.address}
    assert len(addresses) == 2


def expected_leads(at: World) -> dict[str, tuple[str, int]]:
    """Return Service and port by the server name that a worker requests."""
    job = load_job(at.document)
    found = {}
    for worker in job.workers():
        if worker.site == A:
            name = names.worker_service_name(job.key, worker.group, worker.index)
            found[worker.dns_name(job.key)] = (name, 7440)
            found[worker.measuring_dns_name(job.key)] = (name, 7441)
    return found


def test_traefik_gets_the_same_routes() -> None:
    at = routed(TRAEFIK)
    leads = {}
    for route in routes(at.look()):
        assert (route["apiVersion"], route["kind"]) == ("traefik.io/v1alpha1", "IngressRouteTCP")
        assert route["spec"]["tls"] == {"passthrough": True}
        assert route["spec"]["entryPoints"] == ["dlion"]
        for each in route["spec"]["routes"]:
            (backend,) = each["services"]
            host = each["match"].removeprefix("HostSNI(`").removesuffix("`)")
            leads[host] = (backend["name"], backend["port"])
    assert leads == expected_leads(at)


def test_a_site_without_a_gateway_names_the_missing_value() -> None:
    at = routed(None)
    at.run = RunView(open_s=3600.0, ready={A: 2})
    decision = at.look()
    assert routes(decision) == []
    assert opened(decision) == {}
    reason, message = ready_reason(decision)
    assert reason == "NotExposed"
    assert "gateway.address" in message


# ---- the addresses -----------------------------------------------------------------------------


def test_other_sites_get_the_ports_at_the_workers_node() -> None:
    at = world()
    first = at.look()
    assert opened(first) == {}
    at.make_jobs()
    at.expose(first)
    assert opened(at.look()) == {}, "no pod has a node yet"
    at.pods["small-1"]["status"]["hostIP"] = NODE
    worker = load_job(at.document).with_group_ranks().workers()[2]
    assert (worker.group, worker.index) == ("small", 1)
    assert opened(at.look()) == {worker: WorkerAddresses(f"{NODE}:30002", f"{NODE}:30003")}


def test_a_load_balancer_gets_the_ports_that_the_api_server_chose() -> None:
    fresh = world("LoadBalancer")
    assert {each["spec"]["type"] for each in services(fresh.look())} == {"NodePort"}
    settings = LoadBalancer(annotations={"internal": "true"}, class_name="edge")
    at = balanced(settings=replace(SETTINGS, load_balancer=settings))
    made = services(at.look())
    ports = [
        [(port["port"], port["nodePort"], port["targetPort"]) for port in each["spec"]["ports"]]
        for each in made
    ]
    assert ports == [
        [(30000, 30000, 7440), (30001, 30001, 7441)],
        [(30002, 30002, 7440), (30003, 30003, 7441)],
    ]
    for each in made:
        assert (each["spec"]["type"], each["spec"]["loadBalancerClass"]) == ("LoadBalancer", "edge")
        assert each["metadata"]["annotations"] == {"internal": "true"}
    assert services(at.look()) == made


@pytest.mark.parametrize(
    ("ingress", "advertised", "host"),
    [
        ({"ip": "198.51.100.5"}, "", "198.51.100.5"),
        ({"hostname": "a.example"}, "", "a.example"),
        ({"ip": "10.0.0.5"}, "plant-a.example", "plant-a.example"),
    ],
)
def test_other_sites_get_the_load_balancer_once_it_exists(
    ingress: dict[str, str], advertised: str, host: str
) -> None:
    at = balanced(settings=replace(SETTINGS, advertised_address=advertised))
    assert by_index(at.look()) == {}
    at.services[1]["status"] = {"loadBalancer": {"ingress": [ingress]}}
    assert by_index(at.look()) == {1: f"{host}:30002"}


def test_a_missing_load_balancer_is_reported() -> None:
    at = balanced()
    at.run = RunView(open_s=3600.0, ready={A: 2})
    reason, message = ready_reason(at.look())
    assert reason == "NotExposed"
    assert "has no load balancer address yet" in message
    assert "use exposure NodePort" in message
    for service in at.services:
        service["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.5"}]}}
    assert ready_reason(at.look())[0] == "WaitingForPeers"


@pytest.mark.parametrize(
    ("advertised", "host", "policy"),
    [
        ("", NODE, "Local"),
        ("plant-a.example", "plant-a.example", "Cluster"),
        ("fd00::1", "[fd00::1]", "Cluster"),
    ],
)
def test_an_advertised_address_replaces_every_node(advertised: str, host: str, policy: str) -> None:
    at = running(settings=replace(SETTINGS, advertised_address=advertised))
    decision = at.look()
    assert by_index(decision) == {0: f"{host}:30000", 1: f"{host}:30002"}
    assert {each["spec"]["externalTrafficPolicy"] for each in services(decision)} == {policy}


def test_a_worker_that_moves_is_published_at_its_new_node() -> None:
    at = running(workers=1)
    at.advance(60)
    at.pods["old"] = at.pods["small-0"] | {
        "status": {"phase": "Running", "hostIP": NODE},
        "metadata": {**at.pods["small-0"]["metadata"], "name": "old", "uid": "old"},
    }
    moved = at.pods["small-0"]
    moved["metadata"] = {**moved["metadata"], "creationTimestamp": "2026-01-31T12:01:00Z"}
    moved["status"] = {"phase": "Pending"}
    assert by_index(at.look()) == {}, "the worker has left the old node and has no new one"
    moved["status"] = {"phase": "Running", "hostIP": "192.0.2.8"}
    assert by_index(at.look()) == {0: "192.0.2.8:30000"}


def member(index: int, state: MemberState = MemberState.READY) -> Member:
    worker = load_job(world(workers=9).document).workers()[index]
    return Member(worker, 1, state, f"10.0.0.{index}:7440", f"10.0.0.{index}:7441")


def test_an_unreachable_worker_is_not_published() -> None:
    ready, unreached, gone = member(0), member(1), member(2, MemberState.FINISHED)
    known = {ready.identity: WorkerAddresses("a:1", "a:2")}
    advertised = advertised_members((ready, unreached, gone), known)
    assert advertised == (replace(ready, exchange_address="a:1", measuring_address="a:2"), gone)
    assert advertised_members((ready, unreached, gone), None) == (ready, unreached, gone)


def test_a_site_uses_its_own_pods_and_reports_the_ports_to_others() -> None:
    job = load_job(world().document)
    authority = CertificateAuthority(A)
    server = CoordinatorServer("127.0.0.1:0", authority)
    runs = SiteRuns(server, authority=authority, tokens=Tokens(), trigger=lambda _: None)
    runs.open(OpenRun(job, job.workers(), spec_hash="h", age_s=0.0, addresses={}))
    own = [worker for worker in job.workers() if worker.site == A]
    for stream, worker in enumerate(own):
        server.runs[job.key].state.join(_join(worker, stream))
    assert runs.reports()[job.key].workers.members == ()
    addresses = {worker: WorkerAddresses(f"n:{worker.index + 1}", "n:9") for worker in own}
    runs.open(OpenRun(job, job.workers(), spec_hash="h", age_s=0.0, addresses=addresses))
    reported = runs.reports()[job.key].workers.members
    assert [each.exchange_address for each in reported] == ["n:1", "n:2"]
    here = server.membership(job.key).members
    assert [each.exchange_address for each in here] == ["10.0.0.0:7440", "10.0.0.1:7440"]


def _join(worker: WorkerIdentity, stream: int) -> JoinRequested:
    address = f"10.0.0.{worker.index}"
    return JoinRequested(
        stream=stream,
        worker=worker,
        bearer=Bearer(),
        incarnation=1,
        exchange_address=f"{address}:7440",
        measuring_address=f"{address}:7441",
        spec_hash="h",
        known_version=0,
    )


# ---- the status --------------------------------------------------------------------------------


def test_the_obstacle_between_other_sites_and_workers_is_reported() -> None:
    at = running()
    at.services = at.services[:1]
    at.run = RunView(open_s=3600.0, ready={A: 2})
    reason, message = ready_reason(at.look())
    assert reason == "NotExposed"
    assert "small-1: unreachable from other sites: Service digits-small-" in message
    assert condition_statuses(at.look())["Reconciling"] == "True"
    at.advance(301)
    assert condition_statuses(at.look())["Stalled"] == "True"
    at.run = RunView(open_s=3600.0, ready={A: 2, B: 1}, training=True)
    reason, message = ready_reason(at.look())
    assert reason == "Training"
    assert "unreachable from other sites" in message
    at.expose(at.look())
    assert ready_reason(at.look()) == ("Training", "3 workers train")


def test_load_balancers_have_their_full_time_after_a_suspension() -> None:
    at = balanced()
    job = at.jobs["small"]
    at.run = RunView(open_s=3600.0, ready={A: 2})
    at.advance(301)
    assert condition_statuses(at.look())["Stalled"] == "True"
    at.document["spec"]["suspend"] = job["spec"]["suspend"] = True
    at.look()
    at.document["spec"]["suspend"] = job["spec"]["suspend"] = False
    job["status"]["startTime"] = stamp(at.now)
    resumed = at.look()
    assert ready_reason(resumed)[0] == "NotExposed"
    assert condition_statuses(resumed)["Stalled"] == "False"
    at.advance(301)
    assert condition_statuses(at.look())["Stalled"] == "True"


# ---- deletion ------------------------------------------------------------------------------------


def test_services_end_with_their_workers() -> None:
    at = running()
    name = at.services[1]["metadata"]["name"]
    at.document["spec"]["sites"][0]["groups"][0]["workers"] = 1
    assert deleted(at.look()) == [], "the pod still runs"
    at.pods["small-1"]["status"] = {"phase": "Succeeded"}
    assert deleted(at.look()) == [name]


def test_services_of_a_suspended_job_end_after_its_pods() -> None:
    at = running(workers=1)
    at.document["spec"]["suspend"] = True
    assert deleted(at.look()) == []
    at.pods.clear()
    decision = at.look()
    assert deleted(decision) == [each["metadata"]["name"] for each in at.services]
    assert services(decision) == []


def test_services_end_with_the_run_and_with_another_one() -> None:
    at = running(workers=1)
    (service,) = at.services
    at.document["spec"]["runId"] = "2"
    assert deleted(at.look()) == [service["metadata"]["name"]]
    at.document["spec"]["runId"] = "1"
    at.train()
    at.look()
    at.end("small")
    assert deleted(at.look()) == [], "the end of the run is reported first"
    assert deleted(at.look()) == [service["metadata"]["name"]]

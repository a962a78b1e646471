"""Test the NetworkPolicies of a run: which peers its pods reach, and which peers reach them.

- Workers reach the workers and the keeper of their run, DNS and this site's coordinator only.
- The workers of the run reach a worker at the exchange ports. Other sites do so only if the run has
  any. Metrics are open to scrapers.
- Only the run's workers reach a keeper.
- The policies select every pod of the run, whatever labels a podTemplate has, and exist before any
  pod. Values of the site widen the policies or switch them off.

Left out: enforcement by a network (that of the testbed does not enforce them), and the operator's
own policy (tests/chart/test_network_policies.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlion_api import cluster_names as names
from dlion_api.spec import load_job
from dlion_operator.children.network_policies import network_policies
from dlion_operator.children.run_objects import shared_objects
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.kubernetes.client import Kind
from dlion_operator.model.settings import Settings
from dlion_operator.model.tenancy import NetworkSettings
from dlion_operator.plan.decisions import Apply, Create, Delete
from network_rules import ANY, Pod, incoming, outgoing, selects
from operator_world import SETTINGS, World, dlion_job

OPERATOR_LABELS = {"app.kubernetes.io/name": "dlion", "app.kubernetes.io/component": "operator"}
NETWORK = NetworkSettings(
    enabled=True, operator_namespace="dlion-system", operator_labels=OPERATOR_LABELS
)
ON = replace(SETTINGS, network_policies=NETWORK)
OPERATOR = Pod(OPERATOR_LABELS, "dlion-system")
SECRETS_SERVER = Pod({"app": "vault"}, "vault")
NEIGHBOUR = Pod({"app": "database"}, "default")
OUTSIDE = "203.0.113.7"
DNS = {53, 5353, (53, "UDP"), (5353, "UDP")}
EXCHANGE = {names.EXCHANGE_PORT, names.MEASURING_PORT}


def pods(**metadata: Any) -> tuple[Pod, Pod]:
    """Return a worker and the keeper of a job with a podTemplate."""
    job = load_job(dlion_job({"small": 1}, podTemplate={"metadata": metadata}))
    (group,) = job.spec.sites[0].groups
    made = [worker_job(job, group, ON, {"uid": "u"})]
    made += shared_objects(job, ON, {"uid": "u"}, authority_pem="")
    found = [each["spec"]["template"] for each in made if each["kind"] in ("Job", "Deployment")]
    worker, keeper = (Pod(each["metadata"]["labels"], "default") for each in found)
    return worker, keeper


WORKER, KEEPER = pods()
OTHER_RUN = Pod(WORKER.labels | {names.JOB_LABEL: "other"}, "default")
NAMESAKE = Pod(WORKER.labels, "elsewhere")


def policies(settings: Settings = ON) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the policies of the workers and of the keeper."""
    workers, keeper = network_policies(load_job(dlion_job()), settings, {"uid": "u"})
    return workers, keeper


def with_network(**changes: Any) -> Settings:
    return replace(ON, network_policies=replace(NETWORK, **changes))


def test_workers_reach_their_run_dns_and_the_coordinator_and_nothing_else() -> None:
    workers, _ = policies()
    assert outgoing(workers, WORKER) == DNS | EXCHANGE
    assert outgoing(workers, KEEPER) == DNS | {names.KEEPER_PORT}
    assert outgoing(workers, OPERATOR) == DNS | {names.COORDINATOR_PORT}
    for place in (OTHER_RUN, NAMESAKE, NEIGHBOUR, SECRETS_SERVER, OUTSIDE, "169.254.169.254"):
        assert outgoing(workers, place) == DNS, place


def test_only_their_run_reaches_workers_and_all_pods_reach_metrics() -> None:
    workers, _ = policies()
    assert incoming(workers, WORKER) == EXCHANGE | {names.METRICS_PORT}
    for place in (KEEPER, OTHER_RUN, NAMESAKE, NEIGHBOUR, OPERATOR, OUTSIDE):
        assert incoming(workers, place) == {names.METRICS_PORT}, place


def test_workers_reach_their_keeper_and_it_reaches_the_coordinator() -> None:
    _, keeper = policies()
    assert incoming(keeper, WORKER) == {names.KEEPER_PORT}
    assert outgoing(keeper, OPERATOR) == DNS | {names.COORDINATOR_PORT}
    for place in (KEEPER, OTHER_RUN, NAMESAKE, NEIGHBOUR, OUTSIDE):
        assert incoming(keeper, place) == set(), place
        assert outgoing(keeper, place) == DNS, place


def test_other_sites_are_reached_at_the_ports_by_which_they_expose_workers() -> None:
    workers, keeper = policies(with_network(peer_cidrs=("203.0.113.0/24",)))
    ranges = {(names.EXCHANGE_PORT, names.MEASURING_PORT), (30000, 32767)}
    assert outgoing(workers, OUTSIDE) == DNS | ranges
    assert incoming(workers, OUTSIDE) == EXCHANGE | {names.METRICS_PORT}
    assert outgoing(workers, "198.51.100.1") == DNS
    assert outgoing(keeper, OUTSIDE) == DNS
    assert incoming(keeper, OUTSIDE) == set()


def test_a_sites_values_widen_and_narrow_them() -> None:
    storage = {"to": [{"ipBlock": {"cidr": "10.0.0.9/32"}}], "ports": [{"port": 443}]}
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "vault"}}}
    server = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "dns"}}}
    proxy = {"podSelector": {"matchLabels": NEIGHBOUR.labels}}
    workers, keeper = policies(
        with_network(egress=(storage,), metrics_from=(scraper,), dns_to=(server,),
                     gateway_from=(proxy,))
    )  # fmt: skip
    assert outgoing(workers, "10.0.0.9") == {443}
    assert outgoing(keeper, "10.0.0.9") == set()
    assert outgoing(workers, Pod({}, "dns")) == DNS
    assert incoming(workers, SECRETS_SERVER) == {names.METRICS_PORT}
    assert incoming(workers, NEIGHBOUR) == EXCHANGE
    assert incoming(workers, OUTSIDE) == set()


def test_a_coordinator_at_any_configured_address_is_reached() -> None:
    named = replace(
        with_network(operator_namespace=""),
        coordinator=replace(ON.coordinator, address="[fd00::1]:17443"),
    )
    for policy in policies(named):
        assert outgoing(policy, OUTSIDE) == DNS | {17443}


def test_outgoing_traffic_alone_can_be_left_open() -> None:
    workers, keeper = policies(with_network(restrict_egress=False))
    assert outgoing(workers, OUTSIDE) == outgoing(keeper, OUTSIDE) == {ANY}
    assert incoming(workers, OUTSIDE) == {names.METRICS_PORT}
    assert "egress" not in workers["spec"]


def test_a_pod_template_does_not_exempt_a_pod_from_its_policy() -> None:
    hostile = dict.fromkeys(WORKER.labels, "x") | {"app": "database"}
    worker, keeper = pods(labels=hostile)
    of_workers, of_keeper = policies()
    assert selects(of_workers, worker)
    assert selects(of_keeper, keeper)
    assert not selects(of_workers, keeper)
    assert not selects(of_keeper, worker)
    for other in (OTHER_RUN, NAMESAKE, NEIGHBOUR):
        assert not selects(of_workers, other)


@pytest.mark.parametrize("settings", [ON, SETTINGS])
def test_policies_exist_before_any_pod_and_end_with_the_run(settings: Settings) -> None:
    world = World(dlion_job(), settings)
    kinds = [
        each.document["kind"] for each in world.look().actions if isinstance(each, Apply | Create)
    ]
    if settings is SETTINGS:
        assert "NetworkPolicy" not in kinds
        return
    assert kinds[:2] == ["NetworkPolicy", "NetworkPolicy"]
    assert {"Job", "Deployment"} <= set(kinds[2:])
    world.document["status"]["runId"] = world.document["spec"]["runId"]
    world.document["spec"]["runId"] = "2"
    deleted = [
        each.name
        for each in world.look().actions
        if isinstance(each, Delete) and each.kind is Kind.NETWORK_POLICY
    ]
    assert sorted(deleted) == sorted(each["metadata"]["name"] for each in policies())

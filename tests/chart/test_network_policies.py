"""Tests of the chart's network policy: which peers reach the operator, and which it reaches.

Workers and keepers of watched namespaces reach the coordinator. Other sites reach the federation,
if there are any. The values name the clients of metrics. Rules use the labels and ports of the
pods. `helm test` reaches its targets. The operator reaches DNS, the API server's ports and the
other sites' operators at their ports, and nothing else.

Left out: enforcement by a network, which the testbed's lacks; the policies of runs
(tests/unit/operator/children/test_network_policies.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from chart import NAMESPACE, SITE, Helm, entry, merged, nested
from dlion_api import cluster_names as names
from dlion_api.names import JobKey
from network_rules import ANY, Pod, incoming, outgoing, selects

WORKER = names.run_labels(JobKey("ml", "digits", "1"), "plant-a") | {
    names.COMPONENT_LABEL: names.WORKER
}
KEEPER = WORKER | {names.COMPONENT_LABEL: names.KEEPER}
MONITORING = Pod({}, "monitoring")
OUTSIDE = "203.0.113.7"
DNS = {53, 5353, (53, "UDP"), (5353, "UDP")}
API_SERVER = {443, 6443, 8443, 16443}


def policy_of(helm: Helm, values: dict[str, Any]) -> dict[str, Any]:
    return helm.one("NetworkPolicy", merged(SITE, values), only="networkpolicy-operator.yaml")


@pytest.mark.parametrize(
    ("labels", "namespace", "ports"),
    [
        (WORKER, "ml", {"coordinator"}),
        (KEEPER, "ml", {"coordinator"}),
        (WORKER, "elsewhere", set()),
        ({"app": "other"}, "ml", set()),
        ({"app": "other"}, NAMESPACE, set()),
    ],
)
def test_the_operator_is_reached_by_its_workers_only(
    helm: Helm, labels: dict[str, str], namespace: str, ports: set[int | str]
) -> None:
    watched = nested("namespaces", ["ml"])
    scraped = merged(watched, nested("networkPolicies.metricsFrom", [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
         "podSelector": {}}
    ]))  # fmt: skip
    policy = policy_of(helm, scraped)
    assert incoming(policy, Pod(labels, namespace)) == ports
    assert incoming(policy, MONITORING) == {"metrics"}
    anyone = policy_of(helm, watched)
    assert incoming(anyone, Pod(labels, namespace)) == ports | {"metrics"}
    pod = helm.one("Deployment", only="deployment.yaml")["spec"]["template"]
    assert selects(policy, Pod(pod["metadata"]["labels"], NAMESPACE))


def test_helms_test_reaches_its_targets(helm: Helm) -> None:
    policy = policy_of(helm, {})
    pod = helm.one("Pod", only="tests/ready.yaml")
    assert {"health", "metrics"} <= incoming(policy, Pod(pod["metadata"]["labels"], NAMESPACE))
    # Its pod is not an operator, to which the Service would lead workers.
    service = helm.one("Service", only="service.yaml")
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_with_all_namespaces_workers_anywhere_reach_the_operator(helm: Helm) -> None:
    assert "coordinator" in incoming(policy_of(helm, {}), Pod(WORKER, "anywhere"))


def test_the_operator_reaches_only_dns_and_the_api_server(helm: Helm) -> None:
    policy = policy_of(helm, {})
    for place in (OUTSIDE, MONITORING, Pod(WORKER, "ml")):
        assert outgoing(policy, place) == DNS | API_SERVER
    own = policy_of(helm, nested("networkPolicies.apiServerPorts", [6443]))
    assert outgoing(own, OUTSIDE) == DNS | {6443}
    servers = [{"ipBlock": {"cidr": "10.0.0.10/32"}}]
    narrowed = policy_of(helm, nested("networkPolicies.dnsTo", servers))
    assert outgoing(narrowed, OUTSIDE) == API_SERVER
    assert outgoing(narrowed, "10.0.0.10") == API_SERVER | DNS


def test_other_operators_are_reached_at_the_ports_of_their_addresses(helm: Helm) -> None:
    values = {
        "sites": [entry("plant-a"), entry("plant-b", address="plant-b.example:30446"),
                  entry("plant-c", address="plant-c.example:443")],
        "networkPolicies": {"peerCIDRs": ["203.0.113.0/24"], "apiServerPorts": [6443]},
    }  # fmt: skip
    policy = policy_of(helm, values)
    assert outgoing(policy, OUTSIDE) == DNS | {6443, 8446, 30446, 443}
    assert outgoing(policy, "198.51.100.1") == DNS | {6443}
    assert incoming(policy, OUTSIDE) == {"federation", "metrics"}
    assert incoming(policy, "198.51.100.1") == {"metrics"}


def test_outgoing_traffic_alone_can_be_left_open(helm: Helm) -> None:
    policy = policy_of(helm, nested("networkPolicies.restrictEgress", False))
    assert outgoing(policy, OUTSIDE) == {ANY}
    assert incoming(policy, OUTSIDE) == {"metrics"}

"""Who reaches the operator, workers and keepers, by the words of the chart's network policies.

Proves: the coordinator is reached by workers and keepers of watched namespaces only, exchange and
measuring by workers and other sites, a keeper by its site's workers, metrics by whom one says, and
all that by the labels and ports that pods are made with; `helm test` reaches what it asks.
Leaves out: that a network enforces it (the testbed's does not).
"""

from __future__ import annotations

from typing import Any

import pytest

from chart import NAMESPACE, SITE, Helm, merged, nested
from dlion_api import cluster_names as names
from dlion_api.names import JobKey

WORKER = names.run_labels(JobKey("ml", "digits", "1"), "plant-a") | {
    names.COMPONENT_LABEL: names.WORKER
}
KEEPER = WORKER | {names.COMPONENT_LABEL: names.KEEPER}


def admitted(policy: dict[str, Any], labels: dict[str, str], namespace: str) -> set[int | str]:
    """Ports that a pod with these labels in that namespace reaches, by a policy's words."""
    found: set[int | str] = set()
    home = policy["metadata"]["namespace"]
    for rule in policy["spec"]["ingress"]:
        sources = rule.get("from", [{"ipBlock": {"cidr": "0.0.0.0/0"}}])
        if any(_is_from(source, labels, namespace, home) for source in sources):
            found |= {port["port"] for port in rule["ports"]}
    return found


def _is_from(source: dict[str, Any], labels: dict[str, str], namespace: str, home: str) -> bool:
    if "ipBlock" in source:
        return str(source["ipBlock"]["cidr"]) == "0.0.0.0/0"
    if "namespaceSelector" in source:
        there = {"kubernetes.io/metadata.name": namespace}
        if not _selects(source["namespaceSelector"], there):
            return False
    elif namespace != home:
        return False
    return _selects(source["podSelector"], labels)


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


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
    watched = merged(SITE, nested("namespaces", ["ml"]))
    scraped = merged(watched, nested("networkPolicies.metricsFrom", [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
         "podSelector": {}}
    ]))  # fmt: skip
    policy = helm.one("NetworkPolicy", scraped, only="networkpolicy-operator.yaml")
    assert admitted(policy, labels, namespace) == ports
    assert admitted(policy, labels, "monitoring") == {"metrics"}
    anyone = helm.one("NetworkPolicy", watched, only="networkpolicy-operator.yaml")
    assert admitted(anyone, labels, namespace) == ports | {"metrics"}
    pod = helm.one("Deployment", only="deployment.yaml")["spec"]["template"]
    assert _selects(policy["spec"]["podSelector"], pod["metadata"]["labels"])


def test_helms_test_reaches_what_it_asks(helm: Helm) -> None:
    policy = helm.one("NetworkPolicy", only="networkpolicy-operator.yaml")
    pod = helm.one("Pod", only="tests/ready.yaml")
    assert {"health", "metrics"} <= admitted(policy, pod["metadata"]["labels"], NAMESPACE)
    # And is itself no operator, whom the Service would lead workers to.
    service = helm.one("Service", only="service.yaml")
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_with_all_namespaces_workers_anywhere_reach_the_operator(helm: Helm) -> None:
    policy = helm.one("NetworkPolicy", only="networkpolicy-operator.yaml")
    assert "coordinator" in admitted(policy, WORKER, "anywhere")


def test_workers_are_reached_by_peers_and_keepers_by_workers(helm: Helm) -> None:
    values = merged(SITE, {
        "namespaces": ["ml"],
        "networkPolicies": {"jobNamespaces": ["ml", "edge"], "peerCIDRs": []},
    })  # fmt: skip
    policies = helm.objects(values, only="networkpolicy-workers.yaml")
    assert [each["metadata"]["namespace"] for each in policies] == ["ml", "ml", "edge", "edge"]
    workers, keepers = policies[:2]
    assert _selects(workers["spec"]["podSelector"], WORKER)
    assert not _selects(workers["spec"]["podSelector"], KEEPER)
    assert _selects(keepers["spec"]["podSelector"], KEEPER)
    exchange = {names.EXCHANGE_PORT, names.MEASURING_PORT}
    assert admitted(workers, WORKER, "ml") == exchange | {names.METRICS_PORT}
    assert admitted(workers, KEEPER, "ml") == exchange | {names.METRICS_PORT}
    assert admitted(workers, {"app": "other"}, "ml") == {names.METRICS_PORT}
    assert admitted(keepers, WORKER, "ml") == {names.KEEPER_PORT}
    assert admitted(keepers, WORKER, "other") == set()
    assert admitted(keepers, {"app": "other"}, "ml") == set()
    blocks = merged(values, nested("networkPolicies.peerCIDRs", ["10.0.0.0/8", "fd00::/8"]))
    rules = helm.objects(blocks, only="networkpolicy-workers.yaml")[0]["spec"]["ingress"]
    cidrs = [each["ipBlock"]["cidr"] for each in rules[0]["from"] if "ipBlock" in each]
    assert cidrs == ["10.0.0.0/8", "fd00::/8"]

"""The traffic that a NetworkPolicy allows: a small interpreter of networking.k8s.io/v1.

For tests of rendered policies. No network enforces them here.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pod:
    """A pod as the other end of a connection."""

    labels: dict[str, str]
    namespace: str


Place = Pod | str
"""A pod, or an address outside of the cluster."""


def selects(policy: dict[str, Any], pod: Pod) -> bool:
    home = policy["metadata"].get("namespace")
    return pod.namespace == home and _matches(policy["spec"]["podSelector"], pod.labels)


def incoming(policy: dict[str, Any], place: Place) -> set[Any]:
    """Ports of the selected pods that accept connections from that place; `ANY` stands for all."""
    assert "Ingress" in policy["spec"]["policyTypes"]
    return _ports(policy, policy["spec"].get("ingress", []), "from", place)


def outgoing(policy: dict[str, Any], place: Place) -> set[Any]:
    """Ports at that place to which the selected pods may connect; a range is (first, last)."""
    if "Egress" not in policy["spec"]["policyTypes"]:
        return {ANY}
    return _ports(policy, policy["spec"].get("egress", []), "to", place)


ANY = "any"


def _ports(policy: dict[str, Any], rules: list[Any], end: str, place: Place) -> set[Any]:
    found: set[Any] = set()
    home = policy["metadata"].get("namespace")
    for rule in rules:
        assert set(rule) <= {end, "ports"}, rule
        ends = rule.get(end, [])
        if not ends or any(_is_there(each, place, home) for each in ends):
            ports = rule.get("ports", [])
            found |= {_port(port) for port in ports} if ports else {ANY}
    return found


def _port(port: dict[str, Any]) -> Any:
    assert port.get("protocol", "TCP") in ("TCP", "UDP")
    number = port["port"]
    if "endPort" in port:
        return (number, port["endPort"])
    return (number, "UDP") if port.get("protocol") == "UDP" else number


def _is_there(end: dict[str, Any], place: Place, home: str) -> bool:
    if "ipBlock" in end:
        if isinstance(place, Pod):
            return False  # a pod's address may be in it, or not
        network = ipaddress.ip_network(end["ipBlock"]["cidr"])
        return ipaddress.ip_address(place) in network
    if isinstance(place, str):
        return False
    if "namespaceSelector" in end:
        labels = {"kubernetes.io/metadata.name": place.namespace}
        if not _matches(end["namespaceSelector"], labels):
            return False
    elif place.namespace != home:
        return False
    return _matches(end.get("podSelector", {}), place.labels)


def _matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()

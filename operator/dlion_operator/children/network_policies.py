"""NetworkPolicies of a run's pods at a site: what workers and keeper reach, and what reaches them.

They are objects of the run, in its namespace, so that every namespace with jobs has them. They
select pods by the operator's labels, which no podTemplate can change. NetworkPolicies add up:
users who may create them in the namespace may allow more. Ports are those of pods, since a network
compares them after it has translated a Service's address. Source: networking.k8s.io/v1.
"""

from collections.abc import Mapping
from typing import Any, Final

from dlion_api import cluster_names as names
from dlion_api.spec import Job
from dlion_operator.children.pods import metadata_of
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model.settings import Settings

_NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
DNS_PORTS: Final = (53, 5353)
"""5353: the pods of OpenShift's DNS."""
WORKER_PORTS: Final = (names.EXCHANGE_PORT, names.MEASURING_PORT)


def network_policies(job: Job, settings: Settings, owner: Mapping[str, Any]) -> list[Document]:
    """Return the policies of the run's workers and of its keeper; none if the site has none."""
    if not settings.network_policies.enabled:
        return []
    return [_workers(job, settings, owner), _keeper(job, settings, owner)]


def _workers(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    network = settings.network_policies
    blocks: list[Document] = [{"ipBlock": {"cidr": cidr}} for cidr in network.peer_cidrs]
    ingress: list[Document] = [
        {
            "from": [
                _pods(job, settings, names.WORKER),
                *blocks,
                *(dict(each) for each in network.gateway_from),
            ],
            "ports": [_tcp(port) for port in WORKER_PORTS],
        },
        {"ports": [_tcp(names.METRICS_PORT)]},
    ]
    if network.metrics_from:
        ingress[1]["from"] = [dict(each) for each in network.metrics_from]
    egress = [
        *_common_egress(settings),
        {
            "to": [_pods(job, settings, names.WORKER)],
            "ports": [_tcp(port) for port in WORKER_PORTS],
        },
        {"to": [_pods(job, settings, names.KEEPER)], "ports": [_tcp(names.KEEPER_PORT)]},
    ]
    if blocks and network.peer_ports:
        ranges = [_tcp(each.port, each.end_port) for each in network.peer_ports]
        egress.append({"to": blocks, "ports": ranges})
    egress += (dict(each) for each in network.egress)
    name = names.run_name(job.key)
    return _policy(name, names.WORKER, job, settings, owner, ingress, egress)


def _keeper(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    """Commands read its files through the kubelet, which no policy stops."""
    callers = [_pods(job, settings, names.WORKER)]
    ingress: list[Document] = [{"from": callers, "ports": [_tcp(names.KEEPER_PORT)]}]
    name = names.keeper_name(job.key)
    return _policy(name, names.KEEPER, job, settings, owner, ingress, _common_egress(settings))


def _policy(
    name: str,
    component: str,
    job: Job,
    settings: Settings,
    owner: Mapping[str, Any],
    ingress: list[Document],
    egress: list[Document],
) -> Document:
    component_label = {names.COMPONENT_LABEL: component}
    spec: Document = {
        **_pods(job, settings, component),
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    if settings.network_policies.restrict_egress:
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return Kind.NETWORK_POLICY.document(
        metadata_of(name, job, owner, site=settings.site, **component_label), spec=spec
    )


def _pods(job: Job, settings: Settings, component: str) -> Document:
    """Pods of this run at this site."""
    labels = names.run_labels(job.key, settings.site) | {names.COMPONENT_LABEL: component}
    return {"podSelector": {"matchLabels": labels}}


def _common_egress(settings: Settings) -> list[Document]:
    """DNS, and this site's coordinator."""
    network = settings.network_policies
    # At any address: a node's own DNS cache answers at an address that no selector matches.
    dns: Document = {
        "ports": [
            {"protocol": protocol, "port": port}
            for port in DNS_PORTS
            for protocol in ("UDP", "TCP")
        ]
    }
    if network.dns_to:
        dns["to"] = [dict(each) for each in network.dns_to]
    coordinator: Document = {"ports": [_tcp(_coordinator_port(settings))]}
    if network.operator_namespace:
        there = {"matchLabels": {_NAMESPACE_LABEL: network.operator_namespace}}
        labels = {"matchLabels": dict(network.operator_labels)}
        coordinator["to"] = [{"namespaceSelector": there, "podSelector": labels}]
    return [dns, coordinator]


def _coordinator_port(settings: Settings) -> int:
    """The operator's own, or that of an address which a user has given."""
    if settings.network_policies.operator_namespace:
        return settings.coordinator.port
    port = settings.coordinator.address.rpartition(":")[2]
    return int(port) if port.isdecimal() else settings.coordinator.port


def _tcp(port: int, end_port: int = 0) -> Document:
    end = {"endPort": end_port} if end_port > port else {}
    return {"protocol": "TCP", "port": port, **end}

"""What exposes one worker to other sites, unless pod addresses are routable.

A Service, and behind a gateway its routes: each server name leads to one of the Service's ports.
"""

from collections.abc import Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Job
from dlion_operator.children.pods import metadata_of
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model.settings import Gateway, Settings

_SERVICE_PORTS = {names.EXCHANGE: names.EXCHANGE_PORT, names.MEASURING: names.MEASURING_PORT}


def worker_service(
    job: Job,
    worker: WorkerIdentity,
    node_ports: Mapping[str, int],
    settings: Settings,
    owner: Mapping[str, Any],
) -> Document:
    """Return the worker's Service: of type NodePort, LoadBalancer, or ClusterIP behind a gateway.

    `node_ports` are the ports that the API server has chosen, by port name; empty before that. A
    load balancer's Service uses the same numbers as its ports. They are unique in the cluster, as
    they must be where Services share an address (k3s' load balancer uses the nodes' ports).
    """
    labels = {names.COMPONENT_LABEL: names.WORKER, names.GROUP_LABEL: worker.group}
    name = names.worker_service_name(job.key, worker.group, worker.index)
    metadata = metadata_of(name, job, owner, site=settings.site, **labels)
    spec: Document = {
        # A worker becomes ready after it has joined its peers, which must reach it before.
        "publishNotReadyAddresses": True,
        "selector": names.run_labels(job.key, settings.site)
        | labels
        | {names.INDEX_LABEL: str(worker.index)},
        "ports": [{"name": port, "port": number} for port, number in _SERVICE_PORTS.items()],
    }
    if job.spec.network.exposure == "Gateway":
        spec["type"] = "ClusterIP"
    elif job.spec.network.exposure == "NodePort" or not node_ports:
        spec |= {"type": "NodePort", "externalTrafficPolicy": _traffic_policy(job, settings)}
    else:
        spec |= {"type": "LoadBalancer", "externalTrafficPolicy": _traffic_policy(job, settings)}
        spec["ports"] = [
            {
                "name": port,
                "port": node_ports[port],
                "targetPort": number,
                "nodePort": node_ports[port],
            }
            for port, number in _SERVICE_PORTS.items()
        ]
        if settings.load_balancer.class_name:
            spec["loadBalancerClass"] = settings.load_balancer.class_name
        metadata["annotations"] = dict(settings.load_balancer.annotations)
    return Kind.SERVICE.document(metadata, spec=spec)


def _traffic_policy(job: Job, settings: Settings) -> str:
    """Return `Local` if the worker's own node is advertised, which preserves callers' addresses.

    Otherwise any node must accept the connection.
    """
    own_node = job.spec.network.exposure == "NodePort" and not settings.advertised_address
    return "Local" if own_node else "Cluster"


def worker_routes(
    job: Job, worker: WorkerIdentity, gateway: Gateway, service: Mapping[str, Any]
) -> list[Document]:
    """Return routes to the ports of the worker's Service, which owns them."""
    ports = {
        names.EXCHANGE: (worker.dns_name(job.key), names.EXCHANGE_PORT),
        names.MEASURING: (worker.measuring_dns_name(job.key), names.MEASURING_PORT),
    }
    backend = str(service["metadata"]["name"])
    owner = {
        "apiVersion": "v1",
        "kind": "Service",
        "name": backend,
        "uid": service["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": False,  # true would need a right on Services' finalizers
    }
    if gateway.route == "IngressRouteTCP":
        routes = [
            {"match": f"HostSNI(`{host}`)", "services": [{"name": backend, "port": port}]}
            for host, port in ports.values()
        ]
        spec: Document = {"routes": routes, "tls": {"passthrough": True}}
        if gateway.entry_points:
            spec["entryPoints"] = list(gateway.entry_points)
        metadata = metadata_of(backend, job, owner, site=worker.site)
        return [Kind.INGRESS_ROUTE_TCP.document(metadata, spec=spec)]
    return [
        Kind.TLS_ROUTE.document(
            metadata_of(f"{backend}-{part}", job, owner, site=worker.site),
            spec={
                "parentRefs": [_parent(gateway)],
                "hostnames": [host],
                "rules": [{"backendRefs": [{"name": backend, "port": port}]}],
            },
        )
        for part, (host, port) in ports.items()
    ]


def _parent(gateway: Gateway) -> Document:
    parent = gateway.parent
    given = {
        "name": parent.name, "namespace": parent.namespace, "sectionName": parent.section_name
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}

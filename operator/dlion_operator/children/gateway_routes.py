"""Gateway routes to one worker: each server name leads to one of its ports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import WorkerIdentity
from dlion_api.spec import Job
from dlion_operator.children.pods import Document, metadata_of
from dlion_operator.model.settings import Gateway

TLS_ROUTE_VERSION = "gateway.networking.k8s.io/v1"
TRAEFIK_VERSION = "traefik.io/v1alpha1"


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
        kind = {"apiVersion": TRAEFIK_VERSION, "kind": "IngressRouteTCP"}
        return [{**kind, "metadata": metadata, "spec": spec}]
    return [
        {
            "apiVersion": TLS_ROUTE_VERSION,
            "kind": "TLSRoute",
            "metadata": metadata_of(f"{backend}-{part}", job, owner, site=worker.site),
            "spec": {
                "parentRefs": [_parent(gateway)],
                "hostnames": [host],
                "rules": [{"backendRefs": [{"name": backend, "port": port}]}],
            },
        }
        for part, (host, port) in ports.items()
    ]


def _parent(gateway: Gateway) -> Document:
    parent = gateway.parent
    given = {
        "name": parent.name, "namespace": parent.namespace, "sectionName": parent.section_name
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}

"""Objects in every site's cluster before a test starts: CoreDNS, and virtual nodes.

`sites` applies them with kubectl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from testbed.images import COREDNS_IMAGE

if TYPE_CHECKING:
    from testbed.layout import SiteLayout

VIRTUAL = "kwok.x-k8s.io/node"
"""Annotation, label and taint of the nodes that KWOK simulates."""

_COREFILE = """\
.:53 {
    errors
    ready
    health
    kubernetes cluster.local in-addr.arpa {
        pods insecure
        fallthrough in-addr.arpa
        ttl 5
    }
    reload
}
"""
_NAMESPACE = "kube-system"
_CORE_DNS = {"name": "coredns", "namespace": _NAMESPACE}
_LABELS = {"k8s-app": "kube-dns"}


def core_dns(site: SiteLayout) -> list[dict[str, Any]]:
    """CoreDNS as a Deployment behind the usual Service, with the rights that its project
    defines."""
    return [
        *_core_dns_rights(),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _CORE_DNS,
            "data": {"Corefile": _COREFILE},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": _NAMESPACE, "labels": _LABELS},
            "spec": {
                "selector": _LABELS,
                "clusterIP": site.dns_service,
                "ports": [
                    {"name": "dns", "port": 53, "protocol": "UDP"},
                    {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
                ],
            },
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**_CORE_DNS, "labels": _LABELS},
            "spec": {
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": _LABELS}, "spec": _core_dns_pod()},
            },
        },
    ]


def _core_dns_rights() -> list[dict[str, Any]]:
    role = "system:coredns"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": _CORE_DNS},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": role},
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["endpoints", "services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {
                    "apiGroups": ["discovery.k8s.io"],
                    "resources": ["endpointslices"],
                    "verbs": ["list", "watch"],
                },
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": role},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": role,
            },
            "subjects": [{"kind": "ServiceAccount", **_CORE_DNS}],
        },
    ]


def _core_dns_pod() -> dict[str, Any]:
    return {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "containers": [
            {
                "name": "coredns",
                "image": COREDNS_IMAGE,
                "args": ["-conf", "/etc/coredns/Corefile"],
                "resources": {"requests": {"cpu": "20m", "memory": "30Mi"}},
                "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }


def virtual_node(number: int) -> dict[str, Any]:
    """A node that KWOK simulates: pods are scheduled to it and count as running, but nothing
    runs."""
    resources = {"cpu": "4", "memory": "8Gi", "pods": "110"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"virtual-{number}",
            "annotations": {VIRTUAL: "fake"},
            "labels": {
                VIRTUAL: "fake",
                "kubernetes.io/hostname": f"virtual-{number}",
                "kubernetes.io/os": "linux",
            },
        },
        "spec": {"taints": [{"key": VIRTUAL, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": resources, "capacity": resources},
    }

"""Protocol of the Kubernetes API client that the operator needs, and its errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from dlion_api.errors import DLionError, UnavailableError
from dlion_api.names import API_VERSION, KIND, RUNTIME_KIND

Document = dict[str, Any]


class Kind(Enum):
    """The kinds of objects that the operator uses: API version, kind and plural."""

    DLION_JOB = (API_VERSION, KIND, "dlionjobs")
    DLION_RUNTIME = (API_VERSION, RUNTIME_KIND, "dlionruntimes")
    JOB = ("batch/v1", "Job", "jobs")
    POD = ("v1", "Pod", "pods")
    SERVICE = ("v1", "Service", "services")
    CONFIG_MAP = ("v1", "ConfigMap", "configmaps")
    CLAIM = ("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
    NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
    DEPLOYMENT = ("apps/v1", "Deployment", "deployments")
    SECRET = ("v1", "Secret", "secrets")
    NODE = ("v1", "Node", "nodes")
    ADMISSION_POLICY = (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicy",
        "validatingadmissionpolicies",
    )
    ADMISSION_POLICY_BINDING = (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding",
        "validatingadmissionpolicybindings",
    )
    LEASE = ("coordination.k8s.io/v1", "Lease", "leases")
    CERTIFICATE = ("cert-manager.io/v1", "Certificate", "certificates")
    EVENT = ("v1", "Event", "events")
    TLS_ROUTE = ("gateway.networking.k8s.io/v1", "TLSRoute", "tlsroutes")
    INGRESS_ROUTE_TCP = ("traefik.io/v1alpha1", "IngressRouteTCP", "ingressroutetcps")
    WORKLOAD = ("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
    RESOURCE_FLAVOR = ("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors")
    WORKLOAD_PRIORITY_CLASS = (
        "kueue.x-k8s.io/v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses"
    )  # fmt: skip
    PRIORITY_CLASS = ("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses")

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Kind:
        return next(each for each in cls if each.value[1] == document["kind"])

    def document(self, metadata: Mapping[str, Any], **parts: Any) -> Document:
        """Return an object of this kind with these other top-level fields."""
        api_version, kind, _ = self.value
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **parts}


class RequestRefusedError(DLionError):
    """The API server rejected the request (400, 403, 422): a retry does not help."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ConflictError(DLionError):
    """The object exists already or has changed (409): read it again."""


class ServerError(UnavailableError):
    """The API server is unavailable (429, 5xx, no connection): a retry may help."""


@dataclass(frozen=True)
class Listing:
    """A list and its resource version."""

    items: Sequence[Document]
    resource_version: str


@dataclass(frozen=True)
class SigningKeys:
    """The public keys (JWKS) and the issuer of the cluster's service account tokens."""

    jwks: bytes
    issuer: str


class KubernetesClient(Protocol):
    """The API server. All calls may raise RequestRefusedError, ConflictError or ServerError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Return the object or None. `namespace` is empty for a cluster-scoped kind."""
        ...

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server has that kind in that version."""
        ...

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        metadata_only: bool = False,
    ) -> Listing:
        """Return all objects of that kind, without `managedFields`; `namespace` None: in all
        namespaces. `metadata_only`: of each only names, UID, labels and version."""
        ...

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        """Create the object."""
        ...

    async def apply(self, document: Document) -> Document:
        """Apply server-side, with force."""
        ...

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, *, subresource: str = ""
    ) -> Document | None:
        """Apply a merge patch; return None if there is no such object."""
        ...

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        resource_version: str = "",
        grace_s: int | None = None,
    ) -> None:
        """Delete the object, and its dependents in the background; do nothing if it is gone.

        With `uid` or `resource_version`: ConflictError if the object's differs.
        """
        ...

"""Protocol of the Kubernetes API client that the operator needs, and its errors.

`kubernetes_api` implements it. Documents are plain mappings in the API's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from dlion_api.errors import DLionError, UnavailableError

Document = dict[str, Any]


class Kind(Enum):
    """The kinds of objects that the operator uses: API path and plural."""

    DLION_JOB = ("/apis/dlion.dev/v1alpha1", "dlionjobs")
    JOB = ("/apis/batch/v1", "jobs")
    POD = ("/api/v1", "pods")
    SERVICE = ("/api/v1", "services")
    CONFIG_MAP = ("/api/v1", "configmaps")
    CLAIM = ("/api/v1", "persistentvolumeclaims")
    DEPLOYMENT = ("/apis/apps/v1", "deployments")
    SECRET = ("/api/v1", "secrets")
    NODE = ("/api/v1", "nodes")
    LEASE = ("/apis/coordination.k8s.io/v1", "leases")
    CERTIFICATE = ("/apis/cert-manager.io/v1", "certificates")
    EVENT = ("/api/v1", "events")
    TLS_ROUTE = ("/apis/gateway.networking.k8s.io/v1", "tlsroutes")
    INGRESS_ROUTE_TCP = ("/apis/traefik.io/v1alpha1", "ingressroutetcps")

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Kind:
        return _BY_NAME[str(document["kind"])]


_BY_NAME = {
    "DLionJob": Kind.DLION_JOB,
    "Job": Kind.JOB,
    "Pod": Kind.POD,
    "Service": Kind.SERVICE,
    "ConfigMap": Kind.CONFIG_MAP,
    "PersistentVolumeClaim": Kind.CLAIM,
    "Deployment": Kind.DEPLOYMENT,
    "Secret": Kind.SECRET,
    "Node": Kind.NODE,
    "Lease": Kind.LEASE,
    "Certificate": Kind.CERTIFICATE,
    "Event": Kind.EVENT,
    "TLSRoute": Kind.TLS_ROUTE,
    "IngressRouteTCP": Kind.INGRESS_ROUTE_TCP,
}


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


class KubernetesClient(Protocol):
    """The API server. All calls may raise RequestRefusedError, ConflictError or ServerError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """Return the object or None. `namespace` is empty for a cluster-scoped kind."""
        ...

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> Listing:
        """Return all objects of that kind; `namespace` None: in all namespaces."""
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

    async def signing_keys(self) -> bytes:
        """Return the public keys of service account tokens (JWKS)."""
        ...

    async def issuer(self) -> str:
        """Return the issuer of the cluster's service account tokens."""
        ...

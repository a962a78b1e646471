"""What the operator needs of a Kubernetes API server, and how it fails: a small Protocol.

`kubernetes_api` is the real one. Documents are plain mappings, as the API has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from dlion_api.errors import DLionError, UnavailableError

Document = dict[str, Any]


class Kind(Enum):
    """The kinds of objects that the operator touches: path, version, plural."""

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
        """The kind of that document."""
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


class RefusedError(DLionError):
    """The API server will not have it as it is (400, 403, 422): repeating it does not help."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ConflictError(DLionError):
    """It is there already, or was changed meanwhile (409): look again."""


class ServerError(UnavailableError):
    """The API server cannot answer now (429, 5xx, no connection): a retry may help."""


@dataclass(frozen=True)
class Listing:
    """A list as it was at one moment."""

    items: Sequence[Document]
    resource_version: str


class Cluster(Protocol):
    """The API server. Every call raises RefusedError, ConflictError or ServerError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        """The object; None: there is none. `namespace` empty: the kind is in no namespace."""
        ...

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> Listing:
        """All objects of that kind; `namespace` None: everywhere."""
        ...

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        """POST."""
        ...

    async def apply(self, document: Document) -> Document:
        """Server-side apply, forced, under the operator's name."""
        ...

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, *, subresource: str = ""
    ) -> Document | None:
        """A merge patch; None: there is no such object."""
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
        """Deletes it and, in the background, what it owns; where it is gone already, nothing. With
        `uid` or `resource_version` that object or that version alone: else ConflictError."""
        ...

    async def signing_keys(self) -> bytes:
        """The public keys of service account tokens (JWKS)."""
        ...

    async def issuer(self) -> str:
        """Who the cluster's service account tokens say issued them."""
        ...

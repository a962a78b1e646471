"""A `KubernetesClient` that writes only where this operator holds the Lease."""

from __future__ import annotations

from dlion_operator.kubernetes.client import Document, Kind, KubernetesClient, Listing, ServerError
from dlion_operator.kubernetes.lease import LEASE_NAME, Leases


class LeasedCluster:
    """Restricts another `KubernetesClient`. Reads and dry runs always pass.

    A write without the Lease raises ServerError: the Lease may be acquired again.
    """

    def __init__(self, cluster: KubernetesClient, leases: Leases) -> None:
        self._cluster = cluster
        self._leases = leases

    def _check(self, namespace: str, what: str) -> None:
        if not self._leases.holds(namespace):
            message = (
                f"{what} is not written: Lease {LEASE_NAME} of namespace {namespace} is not held"
            )
            raise ServerError(message)

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        return await self._cluster.get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None, *, selector: str = "") -> Listing:
        return await self._cluster.list(kind, namespace, selector=selector)

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        if not dry_run:
            self._check(document["metadata"]["namespace"], f"{document['kind']}")
        return await self._cluster.create(document, dry_run=dry_run)

    async def apply(self, document: Document) -> Document:
        self._check(document["metadata"]["namespace"], f"{document['kind']}")
        return await self._cluster.apply(document)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, *, subresource: str = ""
    ) -> Document | None:
        self._check(namespace, f"{kind.name} {name}")
        return await self._cluster.patch(kind, namespace, name, patch, subresource=subresource)

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
        self._check(namespace, f"{kind.name} {name}")
        await self._cluster.delete(
            kind, namespace, name, uid=uid, resource_version=resource_version, grace_s=grace_s
        )

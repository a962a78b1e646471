"""Store the site's certificate authority in a Secret of the operator's namespace.

The authority is created once and read at each later start, so that running workers stay valid. It
is restored if deleted while the operator runs, and renewed before it expires. Its key is only in
that Secret and in this process; its certificates, which other sites need, are in a ConfigMap as
well. Both are owned by the operator's Service, if the settings name it, and so are deleted with the
release (docs/decisions/0019-what-goes-with-a-release.md).
"""

import asyncio
import base64
import binascii
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from dlion_api.cluster_names import BUNDLE_KEY, MANAGED_BY_LABEL, MANAGER, NAME, NAME_LABEL
from dlion_api.errors import ContractError, DLionError
from dlion_api.names import SiteName
from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
)
from dlion_operator.model.settings import Settings
from dlion_operator.pki.authority import CertificateAuthority, StoredAuthority

CERTIFICATE_KEY: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
CHECK_INTERVAL_S: Final = 3600.0
PUBLISH_RETRY_S: Final = 60.0
"""While the authority is not stored or its certificates are not published."""
_OWNER_KIND: Final = "Service"

_LOG = logging.getLogger(__name__)


class AuthoritySecret:
    """The Secret, and the ConfigMap of the same name that shows its certificates."""

    def __init__(self, cluster: KubernetesClient, settings: Settings, namespace: str) -> None:
        self._cluster = cluster
        self._site = SiteName(settings.site)
        self._life = timedelta(seconds=settings.authority.certificate_life_seconds)
        self._service = settings.authority.owner_service
        self._namespace = namespace
        self._name = settings.authority.secret_name

    async def load(self, *, now: datetime | None = None) -> CertificateAuthority:
        """Return this site's authority: the stored one, renewed if due, or a new one.

        Raises: ContractError: The stored authority is invalid. ConflictError: It was deleted during
        its renewal. RequestRefusedError, ServerError.
        """
        owners = await self._owners()
        secret = await self._with_owners(await self._get(Kind.SECRET), owners)
        if secret is None:
            made = CertificateAuthority(self._site, life=self._life, now=now)
            try:
                await self._cluster.create(self._secret(made.to_stored(), owners))
            except ConflictError:  # another process of this operator created it first
                secret = await self._get(Kind.SECRET)
            else:
                return made
        try:
            stored = _stored(secret or {})
            authority = CertificateAuthority(self._site, life=self._life, stored=stored, now=now)
        except ContractError as error:
            raise ContractError(
                f"Secret {self._namespace}/{self._name}: {error}; delete it to get a new one"
                " (running workers must then be restarted), or name another (authority.secretName)"
            ) from error
        return await self.renewed_if_due(authority, now=now)

    async def renewed_if_due(
        self, authority: CertificateAuthority, *, now: datetime | None = None
    ) -> CertificateAuthority:
        """Return the authority, or its renewal once that is stored.

        Raises: ConflictError: The Secret is gone. RequestRefusedError, ServerError.
        """
        if not authority.is_renewal_due(now=now):
            return authority
        renewed = authority.renewed(now=now)
        data = {"data": _data(renewed.to_stored())}
        if await self._cluster.patch(Kind.SECRET, self._namespace, self._name, data) is None:
            raise ConflictError(f"Secret {self._namespace}/{self._name} is gone")
        _LOG.info("site %s: the certificate of its authority was renewed", authority.site)
        return renewed

    async def publish(self, authority: CertificateAuthority) -> bool:
        """Write its certificates for `dlion trust show`; return whether they are there.

        If that is refused, or another owner's ConfigMap has the name, a warning is logged.
        """
        try:
            owners = await self._owners()
            data = {BUNDLE_KEY: authority.bundle_pem.decode()}
            there = await self._get(Kind.CONFIG_MAP)
            if there is not None and not _is_ours(there):
                raise ContractError(
                    f"ConfigMap {self._namespace}/{self._name} exists already and is not the"
                    " operator's: delete or rename it"
                )
            if there is None or there.get("data") != data or _has_wrong_owners(there, owners):
                await self._cluster.apply(
                    Kind.CONFIG_MAP.document(self._metadata(owners), data=data)
                )
        except DLionError as error:
            _LOG.warning("the site's certificates are not published yet: %s", error)
            return False
        return True

    async def maintain(
        self, authority: CertificateAuthority, replace: Callable[[CertificateAuthority], None]
    ) -> None:
        """Restore, renew and publish it until cancelled; pass each renewal to `replace`."""
        wait_s = PUBLISH_RETRY_S  # the certificates may not be published yet
        while True:
            await asyncio.sleep(wait_s)
            wait_s = PUBLISH_RETRY_S
            try:
                if not await self._restore_if_missing(authority):
                    continue
                successor = await self.renewed_if_due(authority)
            except DLionError as error:
                _LOG.warning("the site's authority could not be stored or renewed yet: %s", error)
                continue
            if successor is not authority:
                authority = successor
                replace(successor)
            if await self.publish(authority):
                wait_s = CHECK_INTERVAL_S

    async def _restore_if_missing(self, authority: CertificateAuthority) -> bool:
        """Restore a deleted Secret, and make the current Service its owner.

        A recreated Service has a new UID, and objects of the old one would be deleted. Return False
        if the Service is gone or being deleted, probably with the release: then nothing is stored.

        Raises: ConflictError, RequestRefusedError, ServerError.
        """
        owners: list[Document] = []
        if self._service:
            try:
                owner = await self._cluster.get(Kind.SERVICE, self._namespace, self._service)
            except RequestRefusedError:
                return True  # unknown whether the release is being deleted: restore nothing
            if owner is None or owner["metadata"].get("deletionTimestamp"):
                _LOG.warning(
                    "the site's authority is not stored: Service %s is not there", self._service
                )
                return False
            owners = [self._reference(owner)]
        if await self._with_owners(await self._get(Kind.SECRET), owners) is None:
            await self._cluster.create(self._secret(authority.to_stored(), owners))
            _LOG.warning(
                "Secret %s/%s, the site's authority, was deleted and has been restored: to get"
                " another key, stop the operator before you delete it",
                self._namespace,
                self._name,
            )
        return True

    async def _get(self, kind: Kind) -> Document | None:
        return await self._cluster.get(kind, self._namespace, self._name)

    async def _owners(self) -> list[Document]:
        """Return the authority's owner references: the Service in the settings, or none."""
        if not self._service:
            return []
        why = "it is not there"
        try:
            if service := await self._cluster.get(Kind.SERVICE, self._namespace, self._service):
                return [self._reference(service)]
        except RequestRefusedError as error:
            why = str(error)
        _LOG.warning(
            "the site's authority is not owned by Service %s/%s (authority.ownerService), and stays"
            " when the operator is uninstalled: %s",
            self._namespace,
            self._service,
            why,
        )
        return []

    def _reference(self, service: Document) -> Document:
        uid = service["metadata"]["uid"]
        return {"apiVersion": "v1", "kind": _OWNER_KIND, "name": self._service, "uid": uid}

    async def _with_owners(
        self, secret: Document | None, owners: list[Document]
    ) -> Document | None:
        """Set the Secret's owners and return it; None: there is none.

        A Secret that the operator did not create stays unchanged. Raises: ServerError.
        """
        if secret is None or not _is_ours(secret) or not _has_wrong_owners(secret, owners):
            return secret
        others = [each for each in _references(secret) if each.get("kind") != _OWNER_KIND]
        patch = {"metadata": {"ownerReferences": [*others, *owners] or None}}
        try:
            return await self._cluster.patch(Kind.SECRET, self._namespace, self._name, patch)
        except RequestRefusedError as error:
            _LOG.warning("the owner of the authority's Secret could not be changed: %s", error)
            return secret

    def _secret(self, kept: StoredAuthority, owners: list[Document]) -> Document:
        metadata = self._metadata(owners)
        return Kind.SECRET.document(metadata, type="kubernetes.io/tls", data=_data(kept))

    def _metadata(self, owners: list[Document]) -> Document:
        labels = {NAME_LABEL: NAME, MANAGED_BY_LABEL: MANAGER}
        metadata: Document = {"name": self._name, "namespace": self._namespace, "labels": labels}
        return metadata | ({"ownerReferences": owners} if owners else {})


def _has_wrong_owners(document: Document, owners: list[Document]) -> bool:
    """Whether the Services that own it differ from `owners`."""
    now = [each.get("uid") for each in _references(document) if each.get("kind") == _OWNER_KIND]
    return now != [each["uid"] for each in owners]


def _references(document: Document) -> list[Document]:
    return list(document["metadata"].get("ownerReferences") or ())


def _data(kept: StoredAuthority) -> Document:
    data = {CERTIFICATE_KEY: kept.certificate_pem, PRIVATE_KEY: kept.key_pem}
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _is_ours(document: Document) -> bool:
    return (document["metadata"].get("labels") or {}).get(MANAGED_BY_LABEL) == MANAGER


def _stored(secret: Document) -> StoredAuthority:
    data = secret.get("data") or {}
    try:
        key = base64.b64decode(data[PRIVATE_KEY], validate=True)
        certificate = base64.b64decode(data[CERTIFICATE_KEY], validate=True)
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise ContractError(f"it lacks {PRIVATE_KEY} and {CERTIFICATE_KEY}: {error!r}") from error
    return StoredAuthority(key, certificate)

"""Store the site's certificate authority in a Secret of the operator's namespace.

The authority is created once and read at each later start, so that running workers stay valid. It
is restored if deleted while the operator runs, and renewed before it expires. Its key is only in
that Secret and in this process; its certificates, which other sites need, are in a ConfigMap as
well. Both are owned by the operator's Service, if the settings name it, and so are deleted with the
release (docs/decisions/0019-what-goes-with-a-release.md).
"""

from __future__ import annotations

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
from dlion_operator.model import settings as site_settings
from dlion_operator.pki.authority import CertificateAuthority, StoredAuthority

CERTIFICATE_KEY: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
CHECK_INTERVAL_S: Final = 3600.0
PUBLISH_RETRY_S: Final = 60.0
"""While the authority is not stored or its certificates are not published."""
_OWNER_KIND: Final = "Service"

_LOG = logging.getLogger(__name__)


async def load_authority(
    cluster: KubernetesClient,
    settings: site_settings.Settings,
    namespace: str,
    *,
    now: datetime | None = None,
) -> CertificateAuthority:
    """Return this site's authority: the stored one, renewed if due, or a new one.

    Raises: ContractError: The stored authority is invalid. ConflictError: It was deleted during
    its renewal. RequestRefusedError, ServerError.
    """
    site = SiteName(settings.site)
    name = settings.authority.secret_name
    life = timedelta(seconds=settings.authority.certificate_life_seconds)
    owners = await _owners(cluster, settings, namespace)
    secret = await _with_owners(
        cluster, await cluster.get(Kind.SECRET, namespace, name), owners, namespace, name
    )
    if secret is None:
        made = CertificateAuthority(site, life=life, now=now)
        try:
            await cluster.create(_secret(made.to_stored(), namespace, name, owners))
        except ConflictError:  # another process of this operator created it first
            secret = await cluster.get(Kind.SECRET, namespace, name)
        else:
            return made
    try:
        authority = CertificateAuthority(site, life=life, stored=_stored(secret or {}), now=now)
    except ContractError as error:
        raise ContractError(
            f"Secret {namespace}/{name}: {error}; delete it to get a new one (running workers"
            " must then be restarted), or name another (authority.secretName)"
        ) from error
    return await renewed_if_due(cluster, settings, namespace, authority, now=now)


async def renewed_if_due(
    cluster: KubernetesClient,
    settings: site_settings.Settings,
    namespace: str,
    authority: CertificateAuthority,
    *,
    now: datetime | None = None,
) -> CertificateAuthority:
    """Return the authority, or its renewal once that is stored.

    Raises: ConflictError: The Secret is gone. RequestRefusedError, ServerError.
    """
    if not authority.is_renewal_due(now=now):
        return authority
    renewed = authority.renewed(now=now)
    name = settings.authority.secret_name
    data = {"data": _data(renewed.to_stored())}
    if await cluster.patch(Kind.SECRET, namespace, name, data) is None:
        raise ConflictError(f"Secret {namespace}/{name} is gone")
    _LOG.info("site %s: the certificate of its authority was renewed", authority.site)
    return renewed


async def publish_bundle(
    cluster: KubernetesClient,
    settings: site_settings.Settings,
    namespace: str,
    authority: CertificateAuthority,
) -> bool:
    """Write the authority's certificates for `dlion trust show`; return whether they are there.

    If that is refused, or another owner's ConfigMap has the name, a warning is logged.
    """
    try:
        owners = await _owners(cluster, settings, namespace)
        shown = _bundle_config_map(authority, namespace, settings.authority.secret_name, owners)
        there = await cluster.get(Kind.CONFIG_MAP, namespace, settings.authority.secret_name)
        if there is not None and not _is_ours(there):
            name = f"{namespace}/{settings.authority.secret_name}"
            raise ContractError(
                f"ConfigMap {name} exists already and is not the operator's: delete or rename it"
            )
        if there is None or there.get("data") != shown["data"] or _has_wrong_owners(there, owners):
            await cluster.apply(shown)
    except DLionError as error:
        _LOG.warning("the site's certificates are not published yet: %s", error)
        return False
    return True


async def maintain_authority(
    cluster: KubernetesClient,
    settings: site_settings.Settings,
    namespace: str,
    authority: CertificateAuthority,
    replace: Callable[[CertificateAuthority], None],
) -> None:
    """Restore, renew and publish the authority until cancelled; pass each renewal to `replace`."""
    wait_s = PUBLISH_RETRY_S  # the certificates may not be published yet
    while True:
        await asyncio.sleep(wait_s)
        wait_s = PUBLISH_RETRY_S
        try:
            if not await _restore_if_missing(cluster, settings, namespace, authority):
                continue
            successor = await renewed_if_due(cluster, settings, namespace, authority)
        except DLionError as error:
            _LOG.warning("the site's authority could not be stored or renewed yet: %s", error)
            continue
        if successor is not authority:
            authority = successor
            replace(successor)
        if await publish_bundle(cluster, settings, namespace, authority):
            wait_s = CHECK_INTERVAL_S


async def _restore_if_missing(
    cluster: KubernetesClient,
    settings: site_settings.Settings,
    namespace: str,
    authority: CertificateAuthority,
) -> bool:
    """Restore a deleted Secret, and make the current Service its owner.

    A recreated Service has a new UID, and objects of the old one would be deleted. Return False if
    the Service is gone or being deleted, probably with the release: then nothing is stored.

    Raises: ConflictError, RequestRefusedError, ServerError.
    """
    name, service = settings.authority.secret_name, settings.authority.owner_service
    owners: list[Document] = []
    if service:
        try:
            owner = await cluster.get(Kind.SERVICE, namespace, service)
        except RequestRefusedError:
            return True  # unknown whether the release is being deleted: restore nothing
        if owner is None or owner["metadata"].get("deletionTimestamp"):
            _LOG.warning("the site's authority is not stored: Service %s is not there", service)
            return False
        owners = [_reference(owner, service)]
    secret = await cluster.get(Kind.SECRET, namespace, name)
    if await _with_owners(cluster, secret, owners, namespace, name) is None:
        await cluster.create(_secret(authority.to_stored(), namespace, name, owners))
        _LOG.warning(
            "Secret %s/%s, the site's authority, was deleted and has been restored: to get another"
            " key, stop the operator before you delete it",
            namespace,
            name,
        )
    return True


async def _owners(
    cluster: KubernetesClient, settings: site_settings.Settings, namespace: str
) -> list[Document]:
    """Return the authority's owner references: the Service in the settings, or none."""
    name = settings.authority.owner_service
    if not name:
        return []
    why = "it is not there"
    try:
        if service := await cluster.get(Kind.SERVICE, namespace, name):
            return [_reference(service, name)]
    except RequestRefusedError as error:
        why = str(error)
    _LOG.warning(
        "the site's authority is not owned by Service %s/%s (authority.ownerService), and stays"
        " when the operator is uninstalled: %s",
        namespace,
        name,
        why,
    )
    return []


def _reference(service: Document, name: str) -> Document:
    uid = service["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": _OWNER_KIND, "name": name, "uid": uid}


async def _with_owners(
    cluster: KubernetesClient,
    secret: Document | None,
    owners: list[Document],
    namespace: str,
    name: str,
) -> Document | None:
    """Set the Secret's owners and return it; None: there is none.

    A Secret that the operator did not create stays unchanged. Raises: ServerError.
    """
    if secret is None or not _is_ours(secret) or not _has_wrong_owners(secret, owners):
        return secret
    patch = {"metadata": {"ownerReferences": [*_other_owners(secret), *owners] or None}}
    try:
        return await cluster.patch(Kind.SECRET, namespace, name, patch)
    except RequestRefusedError as error:
        _LOG.warning("the owner of the authority's Secret could not be changed: %s", error)
        return secret


def _has_wrong_owners(document: Document, owners: list[Document]) -> bool:
    """Whether the Services that own it differ from `owners`."""
    others = _other_owners(document)
    now = [each for each in _references(document) if each not in others]
    return [each.get("uid") for each in now] != [each["uid"] for each in owners]


def _other_owners(document: Document) -> list[Document]:
    """Return its owners that the operator did not set."""
    return [each for each in _references(document) if each.get("kind") != _OWNER_KIND]


def _references(document: Document) -> list[Document]:
    return list(document["metadata"].get("ownerReferences") or ())


def _data(kept: StoredAuthority) -> Document:
    data = {CERTIFICATE_KEY: kept.certificate_pem, PRIVATE_KEY: kept.key_pem}
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _secret(kept: StoredAuthority, namespace: str, name: str, owners: list[Document]) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": _metadata(namespace, name, owners),
        "data": _data(kept),
    }


def _bundle_config_map(
    authority: CertificateAuthority, namespace: str, name: str, owners: list[Document]
) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(namespace, name, owners),
        "data": {BUNDLE_KEY: authority.bundle_pem.decode()},
    }


def _metadata(namespace: str, name: str, owners: list[Document]) -> Document:
    labels = {NAME_LABEL: NAME, MANAGED_BY_LABEL: MANAGER}
    made = {"name": name, "namespace": namespace, "labels": labels}
    return made | ({"ownerReferences": owners} if owners else {})


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

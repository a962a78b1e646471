"""The site's certificate authority, kept in a Secret of the operator's namespace.

Made once, whoever comes first; read by every later start of the operator, so that workers that run
know it again; put back where it is gone while the operator runs; its certificate is renewed long
before it ends. Its key is in that Secret and in this process, nowhere else; its certificates, which
other sites need, are shown in a ConfigMap, too. Both belong to the operator's Service where the
settings name it, so that they go with the release
(docs/decisions/0019-what-goes-with-a-release.md).
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
from dlion_operator import settings as site_settings
from dlion_operator.authority import Authority, KeptAuthority
from dlion_operator.cluster import Cluster, ConflictError, Document, Kind, RefusedError

CERTIFICATE_KEY: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"
CHECK_EVERY_S: Final = 3600.0
SHOWN_AGAIN_S: Final = 60.0
"""Until it is kept, and its certificates are shown."""
_OWNER_KIND: Final = "Service"

_LOG = logging.getLogger(__name__)


async def kept_authority(
    cluster: Cluster,
    settings: site_settings.Settings,
    namespace: str,
    *,
    now: datetime | None = None,
) -> Authority:
    """This site's authority: the one that is kept, renewed where that is due, or a new one.

    Raises: ContractError where what is kept will not do; ConflictError where it went while it was
    renewed; RefusedError, ServerError.
    """
    site = SiteName(settings.site)
    name = settings.authority.secret_name
    life = timedelta(seconds=settings.authority.certificate_life_seconds)
    owners = await _owners(cluster, settings, namespace)
    secret = await _belonging(
        cluster, await cluster.get(Kind.SECRET, namespace, name), owners, namespace, name
    )
    if secret is None:
        made = Authority(site, life=life, now=now)
        try:
            await cluster.create(_secret(made.to_keep(), namespace, name, owners))
        except ConflictError:  # another start of this operator was quicker
            secret = await cluster.get(Kind.SECRET, namespace, name)
        else:
            return made
    try:
        authority = Authority(site, life=life, kept=_kept(secret or {}), now=now)
    except ContractError as error:
        raise ContractError(
            f"Secret {namespace}/{name}: {error}; delete it to have a new one made (workers that"
            " run must then be started again), or name another (authority.secretName)"
        ) from error
    return await renewed_if_due(cluster, settings, namespace, authority, now=now)


async def renewed_if_due(
    cluster: Cluster,
    settings: site_settings.Settings,
    namespace: str,
    authority: Authority,
    *,
    now: datetime | None = None,
) -> Authority:
    """That authority, or its successor once that is kept.

    Raises: ConflictError where there is no Secret to keep it in; RefusedError, ServerError.
    """
    if not authority.is_renewal_due(now=now):
        return authority
    renewed = authority.renewed(now=now)
    name = settings.authority.secret_name
    data = {"data": _data(renewed.to_keep())}
    if await cluster.patch(Kind.SECRET, namespace, name, data) is None:
        raise ConflictError(f"Secret {namespace}/{name} is gone")
    _LOG.info("site %s: the certificate of its authority was renewed", authority.site)
    return renewed


async def show_bundle(
    cluster: Cluster, settings: site_settings.Settings, namespace: str, authority: Authority
) -> bool:
    """Writes the authority's certificates where `dlion trust show` reads them; whether they are
    there. Where that is refused, or another's ConfigMap has the name, the log says so: nothing else
    waits for it."""
    try:
        owners = await _owners(cluster, settings, namespace)
        shown = _shown(authority, namespace, settings.authority.secret_name, owners)
        there = await cluster.get(Kind.CONFIG_MAP, namespace, settings.authority.secret_name)
        if there is not None and not _is_ours(there):
            name = f"{namespace}/{settings.authority.secret_name}"
            raise ContractError(
                f"ConfigMap {name} is there already and is not the operator's: delete or rename it"
            )
        if there is None or there.get("data") != shown["data"] or _belongs_wrongly(there, owners):
            await cluster.apply(shown)
    except DLionError as error:
        _LOG.warning("the site's certificates are not shown to other sites yet: %s", error)
        return False
    return True


async def keep_renewing(
    cluster: Cluster,
    settings: site_settings.Settings,
    namespace: str,
    authority: Authority,
    replace: Callable[[Authority], None],
) -> None:
    """For ever: `replace` is called with each successor of that authority, which is put back where
    it is gone, and whose certificates are shown."""
    wait_s = SHOWN_AGAIN_S  # they may not be yet
    while True:
        await asyncio.sleep(wait_s)
        wait_s = SHOWN_AGAIN_S
        try:
            if not await _kept_still(cluster, settings, namespace, authority):
                continue
            successor = await renewed_if_due(cluster, settings, namespace, authority)
        except DLionError as error:
            _LOG.warning("the site's authority could not be kept or renewed yet: %s", error)
            continue
        if successor is not authority:
            authority = successor
            replace(successor)
        if await show_bundle(cluster, settings, namespace, authority):
            wait_s = CHECK_EVERY_S


async def _kept_still(
    cluster: Cluster, settings: site_settings.Settings, namespace: str, authority: Authority
) -> bool:
    """Puts the Secret back where it is gone, and has it belong to the Service of now: one that is
    made anew takes with it what belonged to the one before. False: that Service is gone or goes,
    with the release as far as can be told, so nothing is kept.

    Raises: ConflictError, RefusedError, ServerError.
    """
    name, service = settings.authority.secret_name, settings.authority.owner_service
    owners: list[Document] = []
    if service:
        try:
            found = await cluster.get(Kind.SERVICE, namespace, service)
        except RefusedError:
            return True  # nobody can tell whether the release goes: nothing is put back
        if found is None or found["metadata"].get("deletionTimestamp"):
            _LOG.warning("the site's authority is not kept: Service %s is not there", service)
            return False
        owners = [_reference(found, service)]
    secret = await cluster.get(Kind.SECRET, namespace, name)
    if await _belonging(cluster, secret, owners, namespace, name) is None:
        await cluster.create(_secret(authority.to_keep(), namespace, name, owners))
        _LOG.warning(
            "Secret %s/%s, the site's authority, was gone and has been put back: to have another"
            " key, stop the operator before you delete it",
            namespace,
            name,
        )
    return True


async def _owners(
    cluster: Cluster, settings: site_settings.Settings, namespace: str
) -> list[Document]:
    """What the authority is to belong to: the Service that the settings name, or nothing."""
    name = settings.authority.owner_service
    if not name:
        return []
    why = "it is not there"
    try:
        if service := await cluster.get(Kind.SERVICE, namespace, name):
            return [_reference(service, name)]
    except RefusedError as error:
        why = str(error)
    _LOG.warning(
        "the site's authority does not belong to Service %s/%s (authority.ownerService), and stays"
        " when the operator is uninstalled: %s",
        namespace,
        name,
        why,
    )
    return []


def _reference(service: Document, name: str) -> Document:
    uid = service["metadata"]["uid"]
    return {"apiVersion": "v1", "kind": _OWNER_KIND, "name": name, "uid": uid}


async def _belonging(
    cluster: Cluster, secret: Document | None, owners: list[Document], namespace: str, name: str
) -> Document | None:
    """That Secret once it belongs to them; None: there is none. One that the operator did not make
    is its maker's. Raises: ServerError."""
    if secret is None or not _is_ours(secret) or not _belongs_wrongly(secret, owners):
        return secret
    patch = {"metadata": {"ownerReferences": [*_other_owners(secret), *owners] or None}}
    try:
        return await cluster.patch(Kind.SECRET, namespace, name, patch)
    except RefusedError as error:
        _LOG.warning("whether it stays at an uninstallation could not be changed: %s", error)
        return secret


def _belongs_wrongly(document: Document, owners: list[Document]) -> bool:
    """Whether the Services that it belongs to are others than these."""
    others = _other_owners(document)
    now = [each for each in _references(document) if each not in others]
    return [each.get("uid") for each in now] != [each["uid"] for each in owners]


def _other_owners(document: Document) -> list[Document]:
    """Of its owners those that the operator did not give it."""
    return [each for each in _references(document) if each.get("kind") != _OWNER_KIND]


def _references(document: Document) -> list[Document]:
    return list(document["metadata"].get("ownerReferences") or ())


def _data(kept: KeptAuthority) -> Document:
    data = {CERTIFICATE_KEY: kept.certificate_pem, PRIVATE_KEY: kept.key_pem}
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _secret(kept: KeptAuthority, namespace: str, name: str, owners: list[Document]) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": _metadata(namespace, name, owners),
        "data": _data(kept),
    }


def _shown(authority: Authority, namespace: str, name: str, owners: list[Document]) -> Document:
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


def _kept(secret: Document) -> KeptAuthority:
    data = secret.get("data") or {}
    try:
        key = base64.b64decode(data[PRIVATE_KEY], validate=True)
        certificate = base64.b64decode(data[CERTIFICATE_KEY], validate=True)
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise ContractError(f"it lacks {PRIVATE_KEY} and {CERTIFICATE_KEY}: {error!r}") from error
    return KeptAuthority(key, certificate)

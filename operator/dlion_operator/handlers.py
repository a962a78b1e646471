"""kopf's part: watches in, one trigger per job out. Handlers are thin, and write nothing.

`on.event` alone, since anything more would leave finalizers behind when the operator is gone, and
would keep state in annotations.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import kopf

from dlion_api.cluster_names import JOB_LABEL, MANAGER
from dlion_api.errors import DLionError
from dlion_api.names import GROUP, VERSION
from dlion_operator.cluster import Document, Kind
from dlion_operator.store import ObjectName, Store, job_of, name_of

REQUEST_TIMEOUT_S = 30.0
INACTIVE_WATCH_S = 70.0
"""A watch without an event or a bookmark for so long is opened anew."""

RESOURCES: Mapping[Kind, tuple[str, str, str]] = {
    Kind.DLION_JOB: (GROUP, VERSION, "dlionjobs"),
    Kind.JOB: ("batch", "v1", "jobs"),
    Kind.POD: ("", "v1", "pods"),
    Kind.SERVICE: ("", "v1", "services"),
    Kind.DEPLOYMENT: ("apps", "v1", "deployments"),
    Kind.CONFIG_MAP: ("", "v1", "configmaps"),
}
"""What is watched, as kopf names it; children by our label."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def registry_of(
    store: Store,
    trigger: Callable[[ObjectName], None],
    *,
    start: Callable[[], Awaitable[None]],
    stop: Callable[[], Awaitable[None]],
) -> kopf.OperatorRegistry:
    """kopf's registry of this operator. `start` before the first event, `stop` after the last."""
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry)
    async def started(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings)
        try:
            await start()
        except (DLionError, OSError) as error:
            # This process ends, and is started again: with half of its parts it were no use.
            raise kopf.PermanentError(str(error)) from error

    @kopf.on.cleanup(registry=registry)
    async def ended(**_: Any) -> None:
        await stop()

    @kopf.on.login(registry=registry, retries=3)
    def logged_in(**keywords: Any) -> kopf.ConnectionInfo | None:
        if SERVICE_ACCOUNT.exists() and not os.environ.get("KUBECONFIG"):
            return _named(_by_address(kopf.login_with_service_account(**keywords)))
        return _named(kopf.login_with_kubeconfig(**keywords))

    for kind, resource in RESOURCES.items():
        _watch(kind, resource, store, trigger, registry)
    return registry


def _by_address(info: kopf.ConnectionInfo | None) -> kopf.ConnectionInfo | None:
    """With the address that every pod is told: kopf's own is a name, and DNS may be away."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if info is None or not host:
        return info
    return replace(info, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


class _Named(kopf.ConnectionInfo):
    """Says in every request whose it is, as audit logs and metrics of API servers show it."""

    def as_http_headers(self) -> dict[str, str]:
        return {**super().as_http_headers(), "User-Agent": MANAGER}


def _named(info: kopf.ConnectionInfo | None) -> kopf.ConnectionInfo | None:
    if info is None:
        return None
    return _Named(**{field.name: getattr(info, field.name) for field in fields(info)})


def _watch(
    kind: Kind,
    resource: tuple[str, str, str],
    store: Store,
    trigger: Callable[[ObjectName], None],
    registry: kopf.OperatorRegistry,
) -> None:
    labels = None if kind is Kind.DLION_JOB else {JOB_LABEL: kopf.PRESENT}

    @kopf.on.event(*resource, id=kind.name, labels=labels, registry=registry)
    async def happened(event: Any, **_: Any) -> None:
        document: Document = dict(event["object"])
        known = store.get(kind, name_of(document))
        if event["type"] == "DELETED":
            store.remove(kind, document)
        else:
            store.put(kind, document)
        # A label that is changed takes an object from one job to another.
        for job in {job_of(kind, each) for each in (known, document) if each is not None}:
            trigger(job)


def _configure(settings: kopf.OperatorSettings) -> None:
    settings.posting.enabled = False  # our events are explicit (`notices`)
    settings.peering.standalone = True
    # Definitions are not watched: that is a right over the whole cluster, and where ours is not
    # there the first list of jobs says so.
    settings.scanning.disabled = True
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVE_WATCH_S
    settings.watching.server_timeout = 600
    settings.process.ultimate_exiting_timeout = 20
    settings.posting.reporting_component = MANAGER
    for kind, resource in RESOURCES.items():
        if kind is not Kind.DLION_JOB:
            settings.watching.label_selectors[resource] = JOB_LABEL

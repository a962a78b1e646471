"""kopf's part: receive watch events, and trigger the jobs concerned. Handlers write nothing.

Only `on.event` is used. Other handlers leave finalizers behind when the operator is gone, and keep
state in annotations.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import kopf

from dlion_api.cluster_names import JOB_LABEL, MANAGER
from dlion_api.errors import DLionError
from dlion_operator.controller.site_operator import SiteOperator
from dlion_operator.kubernetes.api import PAGE
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.kubernetes.store import job_of, name_of

REQUEST_TIMEOUT_S = 30.0
MAX_BACKOFF_S = 10.0
WATCH_INACTIVITY_TIMEOUT_S = 70.0
"""A watch without an event or a bookmark for this long is opened again."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def build_registry(operator: SiteOperator) -> kopf.OperatorRegistry:
    """kopf's registry of this operator, which starts before the first event and stops after the
    last."""
    registry = kopf.OperatorRegistry()

    # An error ends this process: it is restarted, while an operator with half its parts is useless.
    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def started(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings, operator.watched)
        try:
            await operator.start()
        except (DLionError, OSError) as error:
            raise kopf.PermanentError(str(error)) from error

    @kopf.on.cleanup(registry=registry)
    async def ended(**_: Any) -> None:
        await operator.stop()

    @kopf.on.login(registry=registry, retries=3)
    def logged_in(**keywords: Any) -> kopf.ConnectionInfo | None:
        if SERVICE_ACCOUNT.exists() and not os.environ.get("KUBECONFIG"):
            info = kopf.login_with_service_account(**keywords)
            return _with_user_agent(_with_server_address(info))
        return _with_user_agent(kopf.login_with_kubeconfig(**keywords))

    for kind in operator.watched:
        _watch(kind, operator, registry)
    return registry


def _resource(kind: Kind) -> tuple[str, str, str]:
    """The kind in kopf's terms: group, version, plural."""
    api_version, _, plural = kind.value
    group, _, version = api_version.rpartition("/")
    return group, version, plural


def _with_server_address(info: kopf.ConnectionInfo | None) -> kopf.ConnectionInfo | None:
    """Use the address that every pod gets: kopf's default is a name, and DNS may be down."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if info is None or not host:
        return info
    return replace(info, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")


class _NamedConnection(kopf.ConnectionInfo):
    """Sends our user agent with every request, for audit logs and metrics of API servers."""

    def as_http_headers(self) -> dict[str, str]:
        return {**super().as_http_headers(), "User-Agent": MANAGER}


def _with_user_agent(info: kopf.ConnectionInfo | None) -> kopf.ConnectionInfo | None:
    if info is None:
        return None
    return _NamedConnection(**{field.name: getattr(info, field.name) for field in fields(info)})


def _watch(kind: Kind, operator: SiteOperator, registry: kopf.OperatorRegistry) -> None:
    """Watch a kind, children by our label. Where its definition is missing, kopf only warns."""
    store = operator.store
    labels = None if kind is Kind.DLION_JOB else {JOB_LABEL: kopf.PRESENT}

    @kopf.on.event(*_resource(kind), id=kind.name, labels=labels, registry=registry)
    async def happened(event: Any, **_: Any) -> None:
        document: Document = dict(event["object"])
        known = store.get(kind, name_of(document))
        if event["type"] == "DELETED":
            store.remove(kind, document)
        else:
            store.put(kind, document)
        # A changed label may move an object from one job to another.
        for job in {job_of(kind, each) for each in (known, document) if each is not None}:
            operator.trigger(job)


class _RequestBackoffs:
    """Seconds between attempts of a request of kopf, without end: kopf would end this process where
    Kueue's webhook, which converts Workloads, stays away for long."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 2.0, 5.0), itertools.repeat(MAX_BACKOFF_S))


class _NoDiffs(kopf.DiffBaseStorage):
    """Disables kopf's diffs: it stores nothing to compare with."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


def _configure(settings: kopf.OperatorSettings, watched: Iterable[Kind]) -> None:
    settings.posting.enabled = False  # our events are explicit (`event_recorder`)
    # Do not watch CRDs: that needs cluster-wide rights. If ours is missing, the first list of
    # jobs fails. Kueue's may be installed later: then `health` asks for a restart.
    settings.scanning.disabled = True
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.networking.error_backoffs = _RequestBackoffs()
    settings.watching.inactivity_timeout = WATCH_INACTIVITY_TIMEOUT_S
    settings.watching.server_timeout = 600
    # Of thousands of objects a page at a time is in memory, beside what the store keeps of them.
    settings.watching.chunk_size = PAGE
    # kopf copies each object twice for handlers of changes, which we have none of: more than half
    # of what an event costs.
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.process.ultimate_exiting_timeout = 20
    for kind in watched:
        if kind is not Kind.DLION_JOB:
            settings.watching.label_selectors[_resource(kind)] = JOB_LABEL

"""Lists held against what the watches brought, every minute: nothing that was missed stays missed.

A watch that has fallen silent looks like a cluster in which nothing happens. So what a list holds
and the picture has not got, even a moment later, is a sign of it: it is taken over, counted, and
after two such rounds in a row the operator says that it is not well (`health`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from dlion_api.cluster_names import JOB_LABEL
from dlion_api.errors import DLionError
from dlion_api.names import API_VERSION
from dlion_api.names import KIND as DLION_KIND
from dlion_operator.cluster import Cluster, Document, Kind, Listing
from dlion_operator.store import ObjectName, Store, is_newer, job_of, name_of

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0
SETTLE_S = 5.0
"""How long the news of a change may take."""

WATCHED = (
    Kind.DLION_JOB, Kind.JOB, Kind.POD, Kind.SERVICE, Kind.DEPLOYMENT, Kind.CONFIG_MAP
)  # fmt: skip
_TYPES = {
    Kind.DLION_JOB: (API_VERSION, DLION_KIND),
    Kind.JOB: ("batch/v1", "Job"),
    Kind.POD: ("v1", "Pod"),
    Kind.SERVICE: ("v1", "Service"),
    Kind.DEPLOYMENT: ("apps/v1", "Deployment"),
    Kind.CONFIG_MAP: ("v1", "ConfigMap"),
}


class Resync:
    """The rounds, and how fresh the picture is by them."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        namespaces: Sequence[str],
        trigger: Callable[[ObjectName], None],
    ) -> None:
        """`namespaces`: empty means all."""
        self._cluster = cluster
        self._store = store
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._trigger = trigger
        self._lacking: dict[Kind, set[str]] = {kind: set() for kind in WATCHED}
        self.stale_rounds = 0
        """Rounds in a row that found something the watches had missed."""
        self.confirmed_s = time.monotonic()
        """When a round last went through."""

    async def first(self) -> None:
        """Takes over all there is, before anything is decided: half a picture misleads.

        Raises: DLionError where the API server does not answer.
        """
        for kind in WATCHED:
            for document in await self._list(kind):
                self._store.put(kind, document)

    async def run(self, every_s: float = EVERY_S, settle_s: float = SETTLE_S) -> None:
        """Rounds without end."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.round(settle_s)
            except DLionError as error:
                _LOG.warning("the picture of the cluster could not be checked: %s", error)
            except Exception:  # noqa: BLE001 - without its rounds the operator would go blind
                _LOG.exception("the picture of the cluster could not be checked: a defect of ours")

    async def round(self, settle_s: float) -> None:
        """One round. Raises: DLionError where the API server does not answer."""
        listings = {kind: await self._list(kind) for kind in WATCHED}
        await asyncio.sleep(settle_s)
        missed: set[ObjectName] = set()
        for kind, items in listings.items():
            missed |= self._missed(kind, items)
        for name in missed:
            _LOG.warning("%s: a change was missed by the watches", "/".join(name))
            self._trigger(name)
        self.stale_rounds = self.stale_rounds + 1 if missed else 0
        self.confirmed_s = time.monotonic()

    async def _list(self, kind: Kind) -> list[Document]:
        selector = "" if kind is Kind.DLION_JOB else JOB_LABEL
        items: list[Document] = []
        for namespace in self._namespaces:
            listing: Listing = await self._cluster.list(kind, namespace, selector=selector)
            api_version, name = _TYPES[kind]
            items += [{**item, "apiVersion": api_version, "kind": name} for item in listing.items]
        return items

    def _missed(self, kind: Kind, items: list[Document]) -> set[ObjectName]:
        """Takes over what the list had and the picture has not, and the reverse: whose it was.

        What the list lacks may have been made since: it is gone only if the last list lacked that
        very object, too.
        """
        missed = set()
        listed = {name_of(document): document for document in items}
        for document in items:
            known = self._store.get(kind, name_of(document))
            is_news = known is None or is_newer(document, known)
            if is_news and self._store.put(kind, document):
                missed.add(job_of(kind, document))
        lacking = {
            str(known["metadata"].get("uid")): known
            for known in self._store.all(kind)
            if name_of(known) not in listed
        }
        for uid in lacking.keys() & self._lacking[kind]:
            missed.add(job_of(kind, lacking[uid]))
            self._store.remove(kind, lacking[uid])
        self._lacking[kind] = set(lacking)
        return missed

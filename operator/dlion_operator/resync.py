"""Lists held against what the watches brought, every minute: nothing that was missed stays missed.

A watch that has fallen silent looks like a cluster in which nothing happens. So what a list holds
and the picture has not got, even a moment later, is a sign of it: it is taken over, counted, and
after two such rounds in a row the operator says that it is not well (`health`).

Where etcd is put back to a snapshot, resource versions go back, and all that is listed looks older
than what is known. A list at a lower version than one before it tells. Lists are the truth then:
the picture begins anew, and so does what is remembered of jobs. The watches are kopf's, which goes
on from the last version that it saw. It lists anew after a 410 in a stream; any other error in a
stream, such as 504 (too large resource version), and a 410 or 5xx in place of a stream, end kopf
and so this process. But an API server may just as well take a watch at a version to come, and send
nothing until it is reached. So the operator says that it is not well, and is started anew.
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
from dlion_operator.store import ObjectName, Store, as_number, is_newer, job_of, name_of

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
        on_restored: Callable[[], None] = lambda: None,
    ) -> None:
        """`namespaces`: empty means all. `on_restored` is called when versions have gone back, with
        the picture made anew and before any job is looked at."""
        self._cluster = cluster
        self._store = store
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._trigger = trigger
        self._on_restored = on_restored
        self._listed_at: dict[tuple[Kind, str | None], int] = {}
        """The versions of the newest lists."""
        self.has_gone_back = False
        """Whether versions have gone back since this process began: its watches may be silent."""
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
        known = {kind: self._store.newest_version(kind) for kind in WATCHED}
        before = dict(self._listed_at)
        listings = {kind: await self._list(kind) for kind in WATCHED}
        if any(at < max(before.get(key, 0), known[key[0]]) for key, at in self._listed_at.items()):
            await self._begin_anew()
            return
        await asyncio.sleep(settle_s)
        missed: set[ObjectName] = set()
        for kind, items in listings.items():
            missed |= self._missed(kind, items)
        for name in missed:
            _LOG.warning("%s: a change was missed by the watches", "/".join(name))
            self._trigger(name)
        self.stale_rounds = self.stale_rounds + 1 if missed else 0
        self.confirmed_s = time.monotonic()

    async def _begin_anew(self) -> None:
        """The lists of now are all there is."""
        listings = {kind: await self._list(kind) for kind in WATCHED}
        _LOG.error(
            "resource versions of the API server went back: was its etcd restored? What it lists "
            "is taken for all there is"
        )
        jobs = set(self._store.jobs())
        self._store.begin_anew(listings)
        self._lacking = {kind: set() for kind in WATCHED}
        self.has_gone_back = True
        self._on_restored()
        for name in jobs | set(self._store.jobs()):
            self._trigger(name)
        self.confirmed_s = time.monotonic()

    async def _list(self, kind: Kind) -> list[Document]:
        selector = "" if kind is Kind.DLION_JOB else JOB_LABEL
        items: list[Document] = []
        for namespace in self._namespaces:
            listing: Listing = await self._cluster.list(kind, namespace, selector=selector)
            if at := as_number(listing.resource_version):
                self._listed_at[kind, namespace] = at
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

"""Compare lists with what the watches delivered, every minute, so that no missed change persists.

A silent watch looks like an idle cluster. A change that a list shows and the store lacks, even a
moment later, was missed: it is applied and counted. After two such rounds in a row the operator is
unhealthy (`health`).

A restore of etcd decreases resource versions, so all listed objects look outdated. The operator's
Lease reveals it first (`suspect_restore`). So does a list with a lower version than an earlier one,
or an object in a list that is older than the store's, though the list is not: writes since the
restore may have passed the earlier versions. Then the store and all job states are rebuilt from
lists.

Workloads are Kueue's: where they cannot be listed, all other kinds are listed all the same. What is
known of Workloads stays, and `list_missing` tries again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from dlion_api.cluster_names import JOB_LABEL
from dlion_api.errors import DLionError
from dlion_operator.kubernetes.client import (
    Document,
    Kind,
    KubernetesClient,
    Listing,
    RequestRefusedError,
)
from dlion_operator.kubernetes.store import (
    ClusterStore,
    ObjectName,
    as_number,
    is_newer,
    job_of,
    name_of,
    version_of,
)

_LOG = logging.getLogger(__name__)

RESYNC_INTERVAL_S = 60.0
UNLISTED_RETRY_S = 10.0
SETTLE_S = 5.0
"""Time that a watch event may take to arrive."""

WATCHED = (
    Kind.DLION_JOB, Kind.JOB, Kind.POD, Kind.SERVICE, Kind.DEPLOYMENT, Kind.CONFIG_MAP,
    Kind.CLAIM, Kind.NETWORK_POLICY, Kind.WORKLOAD,
)  # fmt: skip
"""Workloads only where the site may queue jobs (`watched_kinds`)."""
NOT_FOUND = 404


def watched_kinds(*, queues_jobs: bool) -> tuple[Kind, ...]:
    """Return what the operator of a site watches. Without `queues_jobs` it has no right to watch
    Workloads."""
    return tuple(kind for kind in WATCHED if queues_jobs or kind is not Kind.WORKLOAD)


class Resync:
    def __init__(
        self,
        cluster: KubernetesClient,
        store: ClusterStore,
        namespaces: Sequence[str],
        trigger: Callable[[ObjectName], None],
        on_restored: Callable[[], None] = lambda: None,
        *,
        kinds: Sequence[Kind] = WATCHED,
    ) -> None:
        """`namespaces`: empty means all. `on_restored` is called when versions have decreased:
        after the store is rebuilt, and before any job is reconciled. `kinds`: what is watched."""
        self._cluster = cluster
        self._store = store
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._trigger = trigger
        self._on_restored = on_restored
        self._kinds = kinds
        self._listed_at: dict[tuple[Kind, str | None], int] = {}
        self.has_version_decreased = False
        """Whether versions have decreased since the start: the watches may be silent."""
        self.has_unwatched_kind = False
        """Whether a kind is served that was not when the watches began: kopf does not watch it."""
        self._is_restore_suspected = asyncio.Event()
        self._not_listed: dict[Kind, set[str]] = {kind: set() for kind in kinds}
        self._unserved: set[Kind] = set()
        """Kinds that gave a 404, whatever errors followed: an upgrade of Kueue gives several."""
        self.stale_rounds = 0
        """Consecutive rounds that found a missed change."""
        self.confirmed_s = time.monotonic()
        """When all kinds were last listed, or all but Workloads where these could not be."""

    async def load(self) -> None:
        """Load all objects before any decision: incomplete data would mislead it.

        Raises: DLionError if the API server does not answer.
        """
        for kind in self._kinds:
            for document in await self._list_or_note(kind):
                self._store.put(kind, document)

    async def _list_or_note(self, kind: Kind) -> list[Document]:
        """List whole objects; note in the store that Workloads cannot be listed, and why.

        Raises: DLionError for other kinds.
        """
        try:
            found = await self._list(kind)
        except DLionError as error:
            if kind is not Kind.WORKLOAD:
                raise
            self._note_unlisted(kind, error)
            return []
        self._store.unlisted.pop(kind, None)
        return found

    def _note_unlisted(self, kind: Kind, error: DLionError) -> None:
        self._store.unlisted[kind] = error
        if isinstance(error, RequestRefusedError) and error.code == NOT_FOUND:
            self._unserved.add(kind)

    async def list_missing(self, every_s: float = UNLISTED_RETRY_S) -> None:
        """List what could not be listed, as Workloads before Kueue is installed, without end."""
        while True:
            await asyncio.sleep(every_s)
            for kind in tuple(self._store.unlisted):
                found = await self._list_or_note(kind)
                if kind in self._store.unlisted:
                    continue
                _LOG.info("%s objects are known now", kind.value[1])
                self.has_unwatched_kind |= kind in self._unserved
                for document in found:
                    self._store.put(kind, document)
                for name in self._store.jobs():
                    self._trigger(name)

    def suspect_restore(self) -> None:
        """Rebuild the store soon: an object of the API server is older than it has been."""
        self._is_restore_suspected.set()

    async def run(self, every_s: float = RESYNC_INTERVAL_S, settle_s: float = SETTLE_S) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._is_restore_suspected.wait()
            try:
                await self.run_once(settle_s)
                continue
            except DLionError as error:
                _LOG.warning("the watches could not be checked: %s", error)
            except Exception:  # noqa: BLE001 - without its rounds the operator would go blind
                _LOG.exception("the watches could not be checked: a defect in DLion")
            await asyncio.sleep(settle_s)  # a restore stays suspected

    async def run_once(self, settle_s: float) -> None:
        """Run one round. Raises: DLionError if the API server does not answer."""
        if self._is_restore_suspected.is_set():
            await self._reset()
            return
        known = {kind: self._store.newest_version(kind) for kind in self._kinds}
        before = dict(self._listed_at)
        listings = await self._list_metadata()
        has_decreased = any(
            at < max(before.get(key, 0), known[key[0]])
            for key, at in self._listed_at.items()
            if key[0] in listings
        )
        if has_decreased or any(self._has_older(kind, items) for kind, items in listings.items()):
            self.suspect_restore()  # until the store is rebuilt: a list may fail
            await self._reset()
            return
        await asyncio.sleep(settle_s)
        missed: set[ObjectName] = set()
        try:
            for kind, items in listings.items():
                missed |= await self._apply_list(kind, items)
        finally:  # what is applied is no news to the next round, though a later list failed
            for name in missed:
                _LOG.warning("%s: a change was missed by the watches", "/".join(name))
                self._trigger(name)
            self.stale_rounds += bool(missed)
        if not missed:
            self.stale_rounds = 0
        self.confirmed_s = time.monotonic()

    async def _list_metadata(self) -> dict[Kind, list[Document]]:
        """List every kind, without Workloads where only these cannot be listed."""
        listings = {}
        for kind in self._kinds:
            if kind in self._store.unlisted:
                continue
            try:
                listings[kind] = await self._list(kind, metadata_only=True)
            except DLionError as error:
                if kind is not Kind.WORKLOAD:
                    raise
                self._note_unlisted(kind, error)
                _LOG.warning("the watch of Workloads could not be checked: %s", error)
        return listings

    def _has_older(self, kind: Kind, items: list[Document]) -> bool:
        """Whether the list shows an object as it was before what the store knows of it.

        What a watch delivers meanwhile is newer than the list, and no sign.
        """
        for document in items:
            known = self._store.get(kind, name_of(document))
            if known is None or is_newer(document, known):
                continue
            namespace = document["metadata"].get("namespace")
            listed_at = self._listed_at.get((kind, namespace), self._listed_at.get((kind, None), 0))
            if version_of(document) < version_of(known) <= listed_at:
                return True
        return False

    async def _reset(self) -> None:
        """Rebuild the store from new lists only."""
        listings = {kind: await self._list_or_note(kind) for kind in self._kinds}
        _LOG.error(
            "resource versions of the API server went back: was its etcd restored? All "
            "data is read again"
        )
        jobs = set(self._store.jobs())
        self._store.replace_all(listings)
        self._not_listed = {kind: set() for kind in self._kinds}
        self._is_restore_suspected.clear()
        # kopf continues its watches at the last version that it received. It lists again after a
        # 410 within a stream. Other errors end kopf, and so this process. But an API server may
        # also accept a watch at a future version and send nothing until then: ask for a restart.
        self.has_version_decreased = True
        self._on_restored()
        for name in jobs | set(self._store.jobs()):
            self._trigger(name)
        self.confirmed_s = time.monotonic()

    async def _list(self, kind: Kind, *, metadata_only: bool = False) -> list[Document]:
        selector = "" if kind is Kind.DLION_JOB else JOB_LABEL
        items: list[Document] = []
        for namespace in self._namespaces:
            listing: Listing = await self._cluster.list(
                kind, namespace, selector=selector, metadata_only=metadata_only
            )
            if at := as_number(listing.resource_version):
                self._listed_at[kind, namespace] = at
            api_version, name, _ = kind.value
            items += [{**item, "apiVersion": api_version, "kind": name} for item in listing.items]
        return items

    async def _apply_list(self, kind: Kind, items: list[Document]) -> set[ObjectName]:
        """Apply differences between the list, which has metadata only, and the store. Return the
        jobs concerned.

        An object that the list lacks may be newer than the list. It is gone only if the previous
        list lacked the same object, too.
        """
        missed = set()
        listed = {name_of(document): document for document in items}
        news = {name for name, item in listed.items() if self._store.is_news(kind, item)}
        for document in await self._list(kind) if news else ():
            if name_of(document) in news and self._store.put(kind, document):
                missed.add(job_of(kind, document))
        not_listed = {
            str(known["metadata"].get("uid")): known
            for known in self._store.all(kind)
            if name_of(known) not in listed
        }
        for uid in not_listed.keys() & self._not_listed[kind]:
            missed.add(job_of(kind, not_listed[uid]))
            self._store.remove(kind, not_listed[uid])
        self._not_listed[kind] = set(not_listed)
        return missed

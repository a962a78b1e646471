"""A job's children brought to where a decision wants them, with no request that changes nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Final

from dlion_api.names import GROUP
from dlion_operator.cluster import Cluster, ConflictError, Document, Kind, RefusedError
from dlion_operator.decisions import Action, Apply, Create, Delete, Notice, Patch
from dlion_operator.resync import WATCHED
from dlion_operator.store import ObjectName, Store

_LOG = logging.getLogger(__name__)

APPLIED_ANNOTATION: Final = f"{GROUP}/applied-hash"
LOOK_AFTER_S: Final = 600.0
"""How long an object that is not watched is taken to be as it was left."""

CACHED = frozenset({Kind.JOB, Kind.POD})
"""Watched kinds: what is known of them is what there is."""


class Children:
    """The children of one DLionJob."""

    def __init__(self, cluster: Cluster, store: Store, monotonic_s: Callable[[], float]) -> None:
        self._cluster = cluster
        self._store = store
        self._monotonic_s = monotonic_s
        self._settled: dict[tuple[Kind, str], tuple[str, float]] = {}
        """Kind and name → hash of what was applied (empty: it is gone), and when that was seen."""
        self._complained: set[str] = set()

    async def carry_out(
        self, actions: Sequence[Action], namespace: str, *, making: bool
    ) -> list[Notice]:
        """Does what concerns objects, in order; what is worth an event.

        New Jobs are checked by a dry run before anything is made.
        Raises: RefusedError, ConflictError, ServerError.
        """
        if making:
            await self._check([action for action in actions if isinstance(action, Create)])
        notices = []
        for action in actions:
            try:
                notice = await self._do(action, namespace, making=making)
            except RefusedError as error:
                if isinstance(action, Create) and Kind.of(action.document) is Kind.JOB:
                    raise
                notice = self._complaint(error)
            if notice is not None:
                notices.append(notice)
        return notices

    async def _do(self, action: Action, namespace: str, *, making: bool) -> Notice | None:
        match action:
            case Apply(document) if making:
                await self._apply(document)
            case Create(document) if making:
                return _created(document) if await self._create(document) else None
            case Patch(kind, name, patch, subresource):
                await self._patch(kind, namespace, name, patch, subresource)
            case Delete(kind, name, uid, grace_s):
                await self._delete(kind, namespace, name, uid, grace_s)
            case _:
                pass
        return None

    def _complaint(self, error: RefusedError) -> Notice | None:
        """What is refused of a run's upkeep ends no run that trains; it is said, once."""
        message = str(error)
        if message in self._complained:
            return None
        self._complained.add(message)
        _LOG.warning("%s", message)
        return Notice("Refused", message, "Warning")

    async def _check(self, creates: list[Create]) -> None:
        for create in creates:
            document = create.document
            kind, name = Kind.of(document), document["metadata"]["name"]
            is_new = kind is Kind.JOB and not self._is_settled(kind, name)
            if is_new and await self._live(document) is None:
                await self._cluster.create(document, dry_run=True)

    async def _apply(self, document: Document) -> None:
        kind, name = Kind.of(document), document["metadata"]["name"]
        digest = _digest(document)
        known, seen_s = self._settled.get((kind, name), ("", 0.0))
        is_recent = self._monotonic_s() - seen_s < LOOK_AFTER_S
        if known == digest and is_recent and not self._is_known_gone(kind, document):
            return
        live = await self._live(document)
        if live is not None:
            _check_owner(live, document)
        annotations = (live or {}).get("metadata", {}).get("annotations") or {}
        if live is None or annotations.get(APPLIED_ANNOTATION) != digest:
            live = await self._cluster.apply(_with_digest(document, digest))
        if kind in WATCHED:
            self._store.put(kind, live)
        self._settled[kind, name] = (digest, self._monotonic_s())

    def _is_known_gone(self, kind: Kind, document: Document) -> bool:
        metadata = document["metadata"]
        name = ObjectName(metadata["namespace"], metadata["name"])
        return kind in WATCHED and self._store.get(kind, name) is None

    async def _create(self, document: Document) -> bool:
        kind, name = Kind.of(document), document["metadata"]["name"]
        if self._is_settled(kind, name) and kind not in CACHED:
            return False
        live = await self._live(document)
        made = live is None
        if live is None:
            live = await self._cluster.create(document)
        else:
            _check_owner(live, document)
        if kind in CACHED:
            self._store.put(kind, live)
        self._settled[kind, name] = ("made", self._monotonic_s())
        return made

    async def _patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, subresource: str
    ) -> None:
        patched = await self._cluster.patch(kind, namespace, name, patch, subresource=subresource)
        if patched is not None:
            self._store.put(kind, patched)

    async def _delete(
        self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None
    ) -> None:
        if kind not in CACHED:
            known, _ = self._settled.get((kind, name), ("unknown", 0.0))
            if known == "":
                return
            if await self._cluster.get(kind, namespace, name) is None:
                self._settled[kind, name] = ("", self._monotonic_s())
                return
        else:
            known_object = self._store.get(kind, ObjectName(namespace, name))
            if grace_s is None and (known_object or {}).get("metadata", {}).get(
                "deletionTimestamp"
            ):
                return
        await self._cluster.delete(kind, namespace, name, uid=uid, grace_s=grace_s)

    def _is_settled(self, kind: Kind, name: str) -> bool:
        known, seen_s = self._settled.get((kind, name), ("", 0.0))
        return bool(known) and self._monotonic_s() - seen_s < LOOK_AFTER_S

    async def _live(self, document: Document) -> Document | None:
        metadata = document["metadata"]
        return await self._cluster.get(Kind.of(document), metadata["namespace"], metadata["name"])


def _digest(document: Document) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _with_digest(document: Document, digest: str) -> Document:
    marked = copy.deepcopy(document)
    marked["metadata"].setdefault("annotations", {})[APPLIED_ANNOTATION] = digest
    return marked


def _check_owner(live: Document, wanted: Document) -> None:
    """Raises: ConflictError where what is there is about to go; RefusedError: it is not ours."""
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    if live["metadata"].get("deletionTimestamp"):
        raise ConflictError(f"{what} of an earlier job is being deleted; it is made anew then")
    if not _owners(live) & _owners(wanted):
        message = f"{what} is there already and belongs to something else: delete or rename it"
        raise RefusedError(message, 403)


def _owners(document: Document) -> set[str]:
    return {str(each.get("uid")) for each in document["metadata"].get("ownerReferences") or ()}


def _created(document: Document) -> Notice | None:
    """What is worth telling of an object that was made."""
    kind, name = document["kind"], document["metadata"]["name"]
    if kind == "Job":
        count = document["spec"]["completions"]
        workers = "1 worker" if count == 1 else f"{count} workers"
        return Notice("WorkersCreated", f"Job {name} with {workers}")
    if kind == "Deployment":
        return Notice("KeeperCreated", f"Deployment {name}")
    return Notice("StorageCreated", f"{kind} {name}") if kind != "ConfigMap" else None

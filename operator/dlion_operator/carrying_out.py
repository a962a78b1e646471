"""A job's children brought to where a decision wants them, with no request that changes nothing."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dlion_api.names import GROUP
from dlion_operator import children
from dlion_operator.attempts import Attempts, ObjectKey, Unmade
from dlion_operator.child_labels import identifying, restoring
from dlion_operator.cluster import (
    Cluster,
    ConflictError,
    Document,
    Kind,
    RefusedError,
    ServerError,
)
from dlion_operator.decisions import Action, Apply, Create, Delete, Notice, Patch
from dlion_operator.resync import WATCHED
from dlion_operator.store import ObjectName, Store, name_of

_LOG = logging.getLogger(__name__)

APPLIED_ANNOTATION: Final = f"{GROUP}/applied-hash"
LOOK_AFTER_S: Final = 600.0
"""How long an object that is not watched is taken to be as it was left."""

MOST_UNANSWERED: Final = 3
"""Of one look's requests for what exposes workers: each may take half a minute."""

BY_UID = frozenset({Kind.JOB, Kind.POD})
"""Kinds that are deleted as they are known, by their UID; others are looked up first."""

LABELLED = tuple(kind for kind in WATCHED if kind not in (Kind.DLION_JOB, Kind.POD))
"""Kinds of children that are found by our labels; those of pods are their controllers'."""

WAITED_FOR = frozenset({Kind.CLAIM, Kind.CONFIG_MAP, Kind.DEPLOYMENT, Kind.SERVICE})
"""By the pods of a run that begins: it is not begun where one of these is refused."""


class Children:
    """The children of one DLionJob."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        monotonic_s: Callable[[], float],
        *,
        owner_uid: str = "",
    ) -> None:
        """`owner_uid` is the DLionJob's; empty: it is gone, and only pods are deleted."""
        self._cluster = cluster
        self._store = store
        self._monotonic_s = monotonic_s
        self._owner_uid = owner_uid
        self._settled: dict[ObjectKey, tuple[str, float]] = {}
        """Kind and name → hash of what was applied (empty: it is gone), and when that was seen."""
        self._known: dict[ObjectKey, tuple[str, dict[str, str]]] = {}
        """Of watched children at the last look: UID, and the labels by which they are found."""
        self._attempts = Attempts(monotonic_s)
        self._complained: set[str] = set()

    @property
    def unmade(self) -> Mapping[str, Unmade]:
        """What of workers' exposure could not be made, by the name of the worker's Service."""
        return self._attempts.unmade()

    async def keep_labels(self, job: ObjectName) -> None:
        """Gives children that were known at the last look their labels back, before anything is
        decided: without them they look as if somebody had deleted them.

        Raises: ConflictError, ServerError.
        """
        there: dict[ObjectKey, Document] = {
            (kind, str(child["metadata"]["name"])): child
            for kind in LABELLED
            for child in self._store.of_job(kind, job)
            if self._owner_uid in _owners(child)
        }
        for key, (uid, labels) in self._known.items():
            kind, name = key
            live = there.get(key)
            try:
                if live is None and self._settled.get(key, ("unknown", 0.0))[0] != "":
                    live = await self._cluster.get(kind, job.namespace, name)
                is_same = live is not None and live["metadata"].get("uid") == uid
                if live is not None and is_same and not live["metadata"].get("deletionTimestamp"):
                    there[key] = await self._restore_labels(kind, live, labels)
            except RefusedError as error:
                self._complaint(error, f"labels of {kind.name} {name} {error.code}")
        self._known = {
            key: (str(child["metadata"].get("uid")), identifying(child))
            for key, child in there.items()
        }

    async def _restore_labels(
        self, kind: Kind, live: Document, labels: Mapping[str, str]
    ) -> Document:
        """The object with these labels, which it may have lost."""
        patch = restoring(live, labels)
        if patch is None:
            return live
        name = name_of(live)
        _LOG.warning("%s %s has lost its labels; they are put back", kind.name, name.name)
        patched = await self._cluster.patch(kind, *name, patch)
        if patched is None:
            raise ConflictError(f"{kind.name} {name.name} is gone since: it is looked at again")
        self._store.put(kind, patched)
        return patched

    async def carry_out(
        self, actions: Sequence[Action], namespace: str, *, making: bool
    ) -> list[Notice]:
        """Does what concerns objects, in order, and exposes workers; what is worth an event.

        New Jobs are checked by a dry run before anything is made, and not made where something is
        refused that comes before them: their pods would wait for it.
        Raises: RefusedError, ConflictError, ServerError, but for what exposes workers.
        """
        begins = making and await self._check([a for a in actions if isinstance(a, Create)])
        notices, exposing = [], []
        for action in actions:
            if isinstance(action, Apply) and action.exposes:
                exposing.append(action)
                continue
            try:
                notice = await self._do(action, namespace, making=making)
            except RefusedError as error:
                is_job = isinstance(action, Create) and Kind.of(action.document) is Kind.JOB
                if is_job or (begins and _is_waited_for(action)):
                    raise
                notice = self._complaint(error, f"{_named(action)} {error.code}")
            if notice is not None:
                notices.append(notice)
        return [*notices, *await self._expose_all(exposing)] if making else notices

    async def _do(self, action: Action, namespace: str, *, making: bool) -> Notice | None:
        match action:
            case Apply(document) if making:
                await self._apply(document)
            case Create(document) if making:
                key = (Kind.of(document), document["metadata"]["name"])
                was_there = self._settled.get(key, ("", 0.0))[0] != ""
                made = await self._create(document)
                return _created(document, was_there=was_there) if made else None
            case Patch(kind, name, patch, subresource):
                await self._patch(kind, namespace, name, patch, subresource)
            case Delete(kind, name, uid, grace_s):
                await self._delete(kind, namespace, name, uid, grace_s)
            case _:
                pass
        return None

    async def _expose_all(self, actions: Sequence[Apply]) -> list[Notice]:
        """What leads other sites to workers: one that cannot be made keeps nothing from others.

        Where the API server gives no answer several times, the rest waits for the next look.
        """
        notices: list[Notice] = []
        unanswered = 0
        for action in actions:
            error = await self._expose(action)
            if error is None or isinstance(error, ConflictError):
                continue
            code = error.code if isinstance(error, RefusedError) else ""
            if notice := self._complaint(error, f"{action.document['kind']} {code}"):
                notices.append(notice)
            unanswered += isinstance(error, ServerError)
            if unanswered >= MOST_UNANSWERED:
                break
        return notices

    async def _expose(self, action: Apply) -> RefusedError | ConflictError | ServerError | None:
        """That one, where it is due; what came in its way."""
        document = action.document
        key, digest = (Kind.of(document), document["metadata"]["name"]), _digest(document)
        if self._is_applied(document, digest):
            self._attempts.succeeded(key)
            return None
        if not self._attempts.is_due(key, digest):
            return None
        is_there: bool | None = None
        try:
            live = await self._live(document)
            is_there = live is not None
            await self._apply_over(live, document, digest)
        except (RefusedError, ConflictError, ServerError) as error:
            if is_there is None:  # it could not be looked at
                was_there = self._settled.get(key, ("", 0.0))[0] != ""
                is_there = was_there or not isinstance(error, RefusedError)
            self._attempts.failed(key, digest, action.exposes, error, is_there=is_there)
            return error
        self._attempts.succeeded(key)
        return None

    def _complaint(self, error: RefusedError | ServerError, about: str) -> Notice | None:
        """What is refused of a run's upkeep ends no run that trains; of each thing it is said
        once."""
        if about in self._complained:
            return None
        self._complained.add(about)
        message = str(error)
        _LOG.warning("%s", message)
        return Notice("Refused", message, "Warning")

    async def _check(self, creates: list[Create]) -> bool:
        """Whether Jobs are among them that are not there yet; they would be taken.

        Raises: RefusedError and what else comes in the way.
        """
        begins = False
        for create in creates:
            document = create.document
            kind, name = Kind.of(document), document["metadata"]["name"]
            is_new = kind is Kind.JOB and not self._is_settled(kind, name)
            if is_new and await self._live(document) is None:
                await self._cluster.create(document, dry_run=True)
                begins = True
        return begins

    async def _apply(self, document: Document) -> None:
        digest = _digest(document)
        if not self._is_applied(document, digest):
            await self._apply_over(await self._live(document), document, digest)

    def _is_applied(self, document: Document, digest: str) -> bool:
        """Whether it is as it should be, as far as is known without asking."""
        kind, name = Kind.of(document), document["metadata"]["name"]
        known, seen_s = self._settled.get((kind, name), ("", 0.0))
        is_recent = self._monotonic_s() - seen_s < LOOK_AFTER_S
        return known == digest and is_recent and not self._is_known_gone(kind, document)

    async def _apply_over(self, live: Document | None, document: Document, digest: str) -> None:
        kind, name = Kind.of(document), document["metadata"]["name"]
        if live is not None:
            _check_owner(live, document)
        annotations = (live or {}).get("metadata", {}).get("annotations") or {}
        is_found = live is None or restoring(live, identifying(document)) is None
        if live is None or annotations.get(APPLIED_ANNOTATION) != digest or not is_found:
            live = await self._cluster.apply(_with_digest(document, digest))
        if kind in WATCHED:
            self._store.put(kind, live)
        self._settled[kind, name] = (digest, self._monotonic_s())

    def _is_known_gone(self, kind: Kind, document: Document) -> bool:
        """Whether the watches say that this job has no such object."""
        known = self._store.get(kind, name_of(document))
        return kind in WATCHED and (known is None or self._owner_uid not in _owners(known))

    async def _create(self, document: Document) -> bool:
        kind, name = Kind.of(document), document["metadata"]["name"]
        if self._is_settled(kind, name) and not self._is_known_gone(kind, document):
            return False
        live = await self._live(document)
        made = live is None
        if live is None:
            live = await self._cluster.create(document)
        else:
            _check_owner(live, document)
            if kind in LABELLED and restoring(live, identifying(document)) is not None:
                await self._restore_labels(kind, live, identifying(document))
                # It was decided on as if there were no such object.
                what = f"{document['kind']} {name}"
                raise ConflictError(f"{what} had lost its labels: the job is looked at again")
            await self._follow(live, document)
        if kind in WATCHED:
            self._store.put(kind, live)
        self._settled[kind, name] = ("made", self._monotonic_s())
        return made

    async def _follow(self, live: Document, document: Document) -> None:
        """What pods that start anew need of the operator of now, whoever made the object."""
        if Kind.of(document) is not Kind.CONFIG_MAP:
            return
        if data := children.to_follow(live, document):
            metadata = document["metadata"]
            patch = {"metadata": {"uid": live["metadata"]["uid"]}, "data": data}
            await self._patch(Kind.CONFIG_MAP, metadata["namespace"], metadata["name"], patch, "")

    async def _patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, subresource: str
    ) -> None:
        patched = await self._cluster.patch(kind, namespace, name, patch, subresource=subresource)
        if patched is not None:
            self._store.put(kind, patched)

    async def _delete(
        self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None
    ) -> None:
        """Every request names the UID: an object that was made since under that name stays."""
        if kind not in BY_UID:
            await self._delete_own(kind, namespace, name, uid)
            return
        known = self._store.get(kind, ObjectName(namespace, name)) or {}
        if grace_s is None and known.get("metadata", {}).get("deletionTimestamp"):
            return
        await self._cluster.delete(kind, namespace, name, uid=uid, grace_s=grace_s)

    async def _delete_own(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Looks the object up, and deletes it if this job owns it. `uid` empty: whichever it is."""
        known, _ = self._settled.get((kind, name), ("unknown", 0.0))
        if known == "":
            return
        live = await self._cluster.get(kind, namespace, name)
        metadata = (live or {}).get("metadata", {})
        live_uid = str(metadata.get("uid", ""))
        if live is None or self._owner_uid not in _owners(live) or uid not in ("", live_uid):
            self._settled[kind, name] = ("", self._monotonic_s())
        elif not metadata.get("deletionTimestamp"):
            await self._cluster.delete(kind, namespace, name, uid=live_uid)

    def _is_settled(self, kind: Kind, name: str) -> bool:
        known, seen_s = self._settled.get((kind, name), ("", 0.0))
        return bool(known) and self._monotonic_s() - seen_s < LOOK_AFTER_S

    async def _live(self, document: Document) -> Document | None:
        metadata = document["metadata"]
        return await self._cluster.get(Kind.of(document), metadata["namespace"], metadata["name"])


def _is_waited_for(action: Action) -> bool:
    """Whether pods of a run that begins would wait for what it makes."""
    return isinstance(action, Create | Apply) and Kind.of(action.document) in WAITED_FOR


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


def _created(document: Document, *, was_there: bool) -> Notice | None:
    """What is worth telling of an object that was made; `was_there`: it had been made before."""
    kind, name = document["kind"], document["metadata"]["name"]
    if kind == "Job":
        count = document["spec"]["completions"]
        workers = "1 worker" if count == 1 else f"{count} workers"
        return Notice("WorkersCreated", f"Job {name} with {workers}")
    if kind == "Deployment":
        return Notice("KeeperCreated", f"Deployment {name}{', which was deleted' * was_there}")
    return Notice("StorageCreated", f"{kind} {name}") if kind != "ConfigMap" else None


def _named(action: Action) -> str:
    """What it is about, whatever the API server says of it."""
    match action:
        case Apply(document) | Create(document):
            return f"{document['kind']} {document['metadata']['name']}"
        case Patch(kind, name) | Delete(kind, name):
            return f"{kind} {name}"
    return type(action).__name__

"""Apply a decision's objects to the cluster, without requests that change nothing."""

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dlion_api.names import GROUP
from dlion_operator.apply.action_messages import creation_event, describe
from dlion_operator.children.labels import identifying_labels, label_patch
from dlion_operator.children.run_objects import config_map_changes
from dlion_operator.kubernetes.client import (
    ConflictError,
    Document,
    Kind,
    KubernetesClient,
    RequestRefusedError,
    ServerError,
)
from dlion_operator.kubernetes.failure_backoff import FailedObject, FailureBackoff, ObjectKey
from dlion_operator.kubernetes.resync import WATCHED
from dlion_operator.kubernetes.store import ClusterStore, ObjectName, name_of, owner_uids
from dlion_operator.plan.decisions import Action, Apply, Create, Delete, JobEvent, Patch

_LOG = logging.getLogger(__name__)

APPLIED_ANNOTATION: Final = f"{GROUP}/applied-hash"
RECHECK_AFTER_S: Final = 600.0
"""How long an object that is not watched is assumed to be unchanged."""

MAX_UNANSWERED: Final = 3
"""Requests for exposing workers that may go unanswered in one pass: each may take half a minute."""

DELETED_BY_UID = frozenset({Kind.JOB, Kind.POD})
"""Kinds that are deleted by their known UID; others are looked up first."""

LABELED_KINDS = tuple(kind for kind in WATCHED if kind not in (Kind.DLION_JOB, Kind.POD))
"""Kinds of children that are found by our labels. Pods get theirs from their controllers."""

PREREQUISITE_KINDS = frozenset(
    {Kind.CLAIM, Kind.CONFIG_MAP, Kind.DEPLOYMENT, Kind.NETWORK_POLICY, Kind.SERVICE}
)
"""Kinds that a new run's pods wait for: the run does not start if one is rejected."""


class ObjectApplier:
    """The objects of one DLionJob."""

    def __init__(
        self,
        cluster: KubernetesClient,
        store: ClusterStore,
        monotonic_s: Callable[[], float],
        *,
        owner_uid: str = "",
    ) -> None:
        """`owner_uid` is the DLionJob's; empty: it is gone, and only pods are deleted."""
        self._cluster = cluster
        self._store = store
        self._monotonic_s = monotonic_s
        self._owner_uid = owner_uid
        self._applied: dict[ObjectKey, tuple[str, float]] = {}
        """Kind and name → hash of what was applied (empty: it is gone), and when that was
        checked."""
        self._last_labels: dict[ObjectKey, tuple[str, dict[str, str]]] = {}
        """UID and identifying labels of each watched child in the last pass."""
        self._backoff = FailureBackoff(monotonic_s)
        self._warned: set[str] = set()
        self._events: list[JobEvent] = []
        """Events to return, also of a pass that has failed."""

    @property
    def failed_objects(self) -> Mapping[str, FailedObject]:
        """Objects for exposing workers that could not be applied, by worker Service."""
        return self._backoff.failed_objects()

    async def restore_labels(self, job: ObjectName) -> None:
        """Put back the labels of children that were known in the last pass. This must come before
        any decision: without its labels a child looks deleted.

        Raises: ConflictError, ServerError.
        """
        there: dict[ObjectKey, Document] = {
            (kind, str(child["metadata"]["name"])): child
            for kind in LABELED_KINDS
            for child in self._store.of_job(kind, job)
            if self._owner_uid in owner_uids(child)
        }
        for key, (uid, labels) in self._last_labels.items():
            kind, name = key
            live = there.get(key)
            try:
                if live is None and self._last_digest(key) != "":
                    live = await self._cluster.get(kind, job.namespace, name)
                is_same = live is not None and live["metadata"].get("uid") == uid
                if live is not None and is_same and not live["metadata"].get("deletionTimestamp"):
                    there[key] = await self._put_labels_back(kind, live, labels)
            except RequestRefusedError as error:
                self._warn_once(error, f"labels of {kind.name} {name} {error.code}")
        self._last_labels = {
            key: (str(child["metadata"].get("uid")), identifying_labels(child))
            for key, child in there.items()
        }

    async def _put_labels_back(
        self, kind: Kind, live: Document, labels: Mapping[str, str]
    ) -> Document:
        patch = label_patch(live, labels)
        if patch is None:
            return live
        name = name_of(live)
        _LOG.warning("%s %s has lost its labels; restoring them", kind.name, name.name)
        patched = await self._cluster.patch(kind, *name, patch)
        if patched is None:
            raise ConflictError(f"{kind.name} {name.name} was deleted meanwhile; retrying")
        self._store.put(kind, patched)
        return patched

    async def execute(
        self, actions: Sequence[Action], namespace: str, *, create: bool
    ) -> list[JobEvent]:
        """Carry out the actions on objects in order, then expose workers. Return events.

        A dry run checks new Jobs before anything is created. No Job is created if an object that
        its pods wait for is rejected.

        Raises: RefusedError, ConflictError, ServerError, except for exposing workers.
        """
        starts_run = create and await self._dry_run_jobs(actions)
        exposing = []
        for action in actions:
            if isinstance(action, Apply) and action.exposes:
                exposing.append(action)
                continue
            try:
                event = await self._execute_one(action, namespace, create=create)
            except RequestRefusedError as error:
                if _is_needed(action) or (starts_run and _is_prerequisite(action)):
                    raise
                event = self._warn_once(error, f"{describe(action)} {error.code}")
            if event is not None:
                self._events.append(event)
        if create:
            await self._expose_all(exposing)
        events, self._events = self._events, []
        return events

    async def _execute_one(
        self, action: Action, namespace: str, *, create: bool
    ) -> JobEvent | None:
        match action:
            case Apply(document) if create:
                await self._apply(document)
            case Create(document) if create:
                was_there = bool(self._last_digest(_key(document)))
                made = await self._create(document)
                return creation_event(document, was_there=was_there) if made else None
            case Patch(kind, name, patch, subresource):
                await self._patch(kind, namespace, name, patch, subresource)
            case Delete():
                await self._delete(action, namespace)
            case _:
                pass
        return None

    async def _expose_all(self, actions: Sequence[Apply]) -> None:
        """Apply the objects that expose workers to other sites; a failure blocks no other one.

        After several unanswered requests the rest waits for the next pass.
        """
        unanswered = 0
        for action in actions:
            error = await self._expose(action)
            if error is None or isinstance(error, ConflictError):
                continue
            code = error.code if isinstance(error, RequestRefusedError) else ""
            if event := self._warn_once(error, f"{action.document['kind']} {code}"):
                self._events.append(event)
            unanswered += isinstance(error, ServerError)
            if unanswered >= MAX_UNANSWERED:
                break

    async def _expose(
        self, action: Apply
    ) -> RequestRefusedError | ConflictError | ServerError | None:
        """Apply that object, if it is due. Return the error, if any."""
        document = action.document
        key, digest = _key(document), _digest(document)
        if self._is_applied(document, digest):
            self._backoff.record_success(key)
            return None
        if not self._backoff.is_due(key, digest):
            return None
        exists: bool | None = None
        try:
            live = await self._live(document)
            exists = live is not None
            await self._apply_over(live, document, digest)
        except (RequestRefusedError, ConflictError, ServerError) as error:
            if exists is None:  # the lookup failed
                exists = bool(self._last_digest(key)) or not isinstance(error, RequestRefusedError)
            self._backoff.record_failure(key, digest, action.exposes, error, exists=exists)
            return error
        self._backoff.record_success(key)
        return None

    def _warn_once(self, error: RequestRefusedError | ServerError, about: str) -> JobEvent | None:
        """Return an event for the first error `about` that. It does not end a run that trains."""
        if about in self._warned:
            return None
        self._warned.add(about)
        message = str(error)
        _LOG.warning("%s", message)
        return JobEvent("Refused", message, "Warning")

    async def _dry_run_jobs(self, actions: Sequence[Action]) -> bool:
        """Check new Jobs by a dry run. Return whether there are any.

        Raises: RefusedError, ConflictError, ServerError.
        """
        starts_run = False
        for document in (each.document for each in actions if isinstance(each, Create)):
            is_new = Kind.of(document) is Kind.JOB and not self._is_recently_applied(document)
            if is_new and await self._create_or_get(document, dry_run=True) is None:
                starts_run = True
        return starts_run

    async def _create_or_get(self, document: Document, *, dry_run: bool = False) -> Document | None:
        """Create the object; if it is there already, return it instead.

        What is watched is looked for in the store, and in the cluster only if it cannot be created:
        an object without our labels is not watched.

        Raises: RefusedError, ConflictError, ServerError.
        """
        kind = Kind.of(document)
        if (live := await self._live(document, is_new=kind in WATCHED)) is not None:
            return live
        try:
            made = await self._cluster.create(document, dry_run=dry_run)
        except (ConflictError, RequestRefusedError):
            live = await self._get(document) if kind in WATCHED else None
            if live is None:
                raise
            return live
        if not dry_run:
            self._record(made, document, "made")
        return None

    async def _apply(self, document: Document) -> None:
        digest = _digest(document)
        if not self._is_applied(document, digest):
            await self._apply_over(await self._live(document), document, digest)

    def _is_applied(self, document: Document, digest: str) -> bool:
        """Whether the object is up to date, as far as is known without a request."""
        is_same = self._last_digest(_key(document)) == digest
        return is_same and self._is_there(document)

    async def _apply_over(self, live: Document | None, document: Document, digest: str) -> None:
        """Apply the document unless `live` has it already, with the labels that find it.

        Raises: as `_check_owner` and `KubernetesClient.apply`.
        """
        if live is not None:
            _check_owner(live, document)
        annotations = (live or {}).get("metadata", {}).get("annotations") or {}
        has_labels = live is not None and label_patch(live, identifying_labels(document)) is None
        if live is None or annotations.get(APPLIED_ANNOTATION) != digest or not has_labels:
            live = await self._cluster.apply(_with_digest(document, digest))
        self._record(live, document, digest)

    def _record(self, live: Document, document: Document, digest: str) -> None:
        key = _key(document)
        if key[0] in WATCHED:
            self._store.put(key[0], live)
        self._applied[key] = (digest, self._monotonic_s())

    def _is_there(self, document: Document) -> bool:
        """Whether the object was applied recently, and the watches have not lost it."""
        kind = Kind.of(document)
        known = self._store.get(kind, name_of(document))
        is_kept = known is not None and self._owner_uid in owner_uids(known)
        return self._is_recently_applied(document) and (is_kept or kind not in WATCHED)

    async def _create(self, document: Document) -> bool:
        if self._is_there(document):
            return False
        live = await self._create_or_get(document)
        if live is None:
            return True
        _check_owner(live, document)
        (kind, name), labels = _key(document), identifying_labels(document)
        if kind in LABELED_KINDS and label_patch(live, labels) is not None:
            await self._put_labels_back(kind, live, labels)
            # The decision assumed that there is no such object.
            what = f"{document['kind']} {name}"
            raise ConflictError(f"{what} had lost its labels; reconciling the job again")
        if kind is Kind.CONFIG_MAP and (data := config_map_changes(live, document)):
            # What new pods need from the current operator.
            patch = {"metadata": {"uid": live["metadata"]["uid"]}, "data": data}
            await self._patch(kind, document["metadata"]["namespace"], name, patch, "")
        self._record(live, document, "made")
        return False

    async def _patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, subresource: str
    ) -> None:
        patched = await self._cluster.patch(kind, namespace, name, patch, subresource=subresource)
        if patched is not None and kind in WATCHED:
            self._store.put(kind, patched)

    async def _delete(self, action: Delete, namespace: str) -> None:
        """Delete by UID: a newer object of the same name stays."""
        kind, name = action.kind, action.name
        if kind not in DELETED_BY_UID:
            await self._delete_own(kind, namespace, name, action.uid)
            return
        known = self._store.get(kind, ObjectName(namespace, name)) or {}
        if action.grace_s is None and known.get("metadata", {}).get("deletionTimestamp"):
            return
        await self._cluster.delete(kind, namespace, name, uid=action.uid, grace_s=action.grace_s)

    async def _delete_own(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Look the object up, and delete it if this job owns it. An empty `uid` matches any."""
        if self._last_digest((kind, name)) == "":
            return
        known = self._store.get(kind, ObjectName(namespace, name))
        live = await self._cluster.get(kind, namespace, name)
        metadata = (live or {}).get("metadata", {})
        live_uid = str(metadata.get("uid", ""))
        if known is not None and live_uid != str(known["metadata"].get("uid", "")):
            self._store.remove(kind, known)  # else a deleted Workload admits the run once resumed
        if live is None or self._owner_uid not in owner_uids(live) or uid not in ("", live_uid):
            self._applied[kind, name] = ("", self._monotonic_s())
        elif not metadata.get("deletionTimestamp"):
            await self._cluster.delete(kind, namespace, name, uid=live_uid)
            if kind not in WATCHED:
                self._applied.pop((kind, name), None)

    def _last_digest(self, key: ObjectKey) -> str | None:
        """The hash of what was applied. Empty: the object is gone. None: not known."""
        return self._applied.get(key, (None, 0.0))[0]

    def _is_recently_applied(self, document: Document) -> bool:
        known, checked_s = self._applied.get(_key(document), ("", 0.0))
        return bool(known) and self._monotonic_s() - checked_s < RECHECK_AFTER_S

    async def _live(self, document: Document, *, is_new: bool = False) -> Document | None:
        """The object as it is. None: it is not there, or, with `is_new`, not known."""
        if Kind.of(document) in WATCHED:
            known = self._store.get(Kind.of(document), name_of(document))
            if known is not None or is_new:
                return known
        return await self._get(document)

    async def _get(self, document: Document) -> Document | None:
        metadata = document["metadata"]
        return await self._cluster.get(Kind.of(document), metadata["namespace"], metadata["name"])


def _key(document: Document) -> ObjectKey:
    return Kind.of(document), str(document["metadata"]["name"])


def _is_needed(action: Action) -> bool:
    """Whether the run waits for this object, also if other objects of it exist."""
    kinds = (Kind.JOB, Kind.WORKLOAD)
    return isinstance(action, Create) and Kind.of(action.document) in kinds


def _is_prerequisite(action: Action) -> bool:
    """Whether a new run's pods would wait for this object."""
    return isinstance(action, Create | Apply) and Kind.of(action.document) in PREREQUISITE_KINDS


def _digest(document: Document) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _with_digest(document: Document, digest: str) -> Document:
    marked = copy.deepcopy(document)
    marked["metadata"].setdefault("annotations", {})[APPLIED_ANNOTATION] = digest
    return marked


def _check_owner(live: Document, wanted: Document) -> None:
    """Check that this job owns the live object.

    Raises: ConflictError if it is being deleted; RefusedError if it has another owner.
    """
    what = f"{wanted['kind']} {wanted['metadata']['name']}"
    if live["metadata"].get("deletionTimestamp"):
        raise ConflictError(f"{what} of an earlier job is being deleted; it is recreated then")
    if not owner_uids(live) & owner_uids(wanted):
        message = f"{what} already exists and has another owner: delete or rename it"
        raise RequestRefusedError(message, 403)

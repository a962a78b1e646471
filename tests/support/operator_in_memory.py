"""A reconciler between an API server and a coordinator in memory, for tests of the operator.

The server stores objects and counts requests. That a real one accepts them is tested in
tests/cluster.
"""

from __future__ import annotations

import asyncio
import copy
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dlion_api.cluster_names import INDEX_LABEL, JOB_LABEL
from dlion_operator.apply.event_recorder import EventRecorder
from dlion_operator.controller.reconcile import Reconciler
from dlion_operator.kubernetes.client import ConflictError, Document, Kind, Listing
from dlion_operator.kubernetes.resync import WATCHED
from dlion_operator.kubernetes.store import ClusterStore, ObjectName
from dlion_operator.plan.observed import RunView
from operator_world import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from dlion_api.names import JobKey, SiteName
    from dlion_operator.model.settings import Settings
    from dlion_operator.pki.named_authority import NamedAuthority
    from dlion_operator.plan.decisions import JobEvent, OpenRun
    from dlion_operator.plan.objects.exposure import Addresses

NAME = ObjectName("default", "digits")
READS = ("get", "list", "dry run")


class KeptObjects:
    """A `Cluster` in memory that counts the requests."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str], Document] = {}
        self.requests: list[tuple[str, str]] = []
        self.deleted: list[tuple[Kind, str, str]] = []
        """Kind, name and UID of each requested delete."""
        self.unserved: set[Kind] = set()
        self.refuse: Callable[[str, Document], None] = lambda _verb, _document: None
        self._version = 100

    def _note(self, verb: str, document: Document) -> None:
        self.requests.append((verb, str(document.get("kind"))))
        self.refuse(verb, document)

    def writes(self) -> list[tuple[str, str]]:
        """Requests that change something other than events."""
        return [r for r in self.requests if r[0] not in READS and r[1] != "Event"]

    def _keep(self, document: Document) -> Document:
        self._version += 1
        kept = copy.deepcopy(document)
        kept["metadata"].setdefault("uid", f"uid-{self._version}")
        kept["metadata"]["resourceVersion"] = str(self._version)
        self.objects[Kind.of(document), kept["metadata"]["name"]] = kept
        return copy.deepcopy(kept)

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        self._note("get", {"kind": kind.name})
        return copy.deepcopy(self.objects.get((kind, name)))

    async def serves(self, kind: Kind) -> bool:
        self._note("get", {"kind": "APIResourceList"})
        return kind not in self.unserved

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        metadata_only: bool = False,
    ) -> Listing:
        self._note("list", {"kind": kind.name})
        return Listing([d for (k, _), d in self.objects.items() if k is kind], "1")

    async def create(self, document: Document, *, dry_run: bool = False) -> Document:
        self._note("dry run" if dry_run else "create", document)
        if dry_run:
            return document
        if (Kind.of(document), document["metadata"]["name"]) in self.objects:
            raise ConflictError("there already")
        return self._keep(document)

    async def apply(self, document: Document) -> Document:
        self._note("apply", document)
        return self._keep(document)

    async def patch(
        self, kind: Kind, namespace: str, name: str, patch: Document, *, subresource: str = ""
    ) -> Document | None:
        kept = self.objects.get((kind, name))
        self._note("patch", {"kind": subresource or kind.name})
        uid = patch.get("metadata", {}).get("uid")
        if kept is not None and uid not in (None, kept["metadata"]["uid"]):
            raise ConflictError("of another object")
        version = patch.get("metadata", {}).get("resourceVersion")
        if kept is not None and version not in (None, kept["metadata"]["resourceVersion"]):
            raise ConflictError("changed meanwhile")
        if kept is None:
            return None
        return self._keep(_merged(kept, patch))

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        resource_version: str = "",
        grace_s: int | None = None,
    ) -> None:
        self._note("delete", {"kind": kind.name})
        self.deleted.append((kind, name, uid))
        kept = self.objects.get((kind, name))
        if kept is not None and uid not in ("", kept["metadata"]["uid"]):
            raise ConflictError("of another object")
        if kept is not None and resource_version not in ("", kept["metadata"]["resourceVersion"]):
            raise ConflictError("changed meanwhile")
        self.objects.pop((kind, name), None)


class NoWorkers:
    """A coordinator without workers; `current_view` is the view that it returns."""

    def __init__(self) -> None:
        self.current_view: RunView | None = None
        self.others = RunView(open_s=0.0)
        self.asked: list[SiteName] = []
        self.open_runs: list[JobKey] = []
        self.addresses: Addresses | None = None
        self.pending_events: tuple[JobEvent, ...] = ()
        self.authority: NamedAuthority | None = None
        self.known_by = "PEM"
        self.kept_bundles: Mapping[SiteName, bytes] = {}

    def open(self, action: OpenRun) -> None:
        self.open_runs, self.addresses = [action.job.key], action.addresses
        self.authority, self.kept_bundles = action.authority, action.kept_bundles

    def stop(self, run: JobKey, reason: str) -> None: ...
    def finish(self, run: JobKey, reason: str, *, succeeded: bool) -> None: ...
    def note(self, run: JobKey, events: Iterable[JobEvent]) -> None: ...

    def close(self, namespace: str, name: str) -> None:
        self.open_runs = []

    def view(self, run: JobKey) -> RunView | None:
        return self.current_view

    def remote_view(self, run: JobKey, sites: Collection[SiteName]) -> RunView:
        self.asked = list(sites)
        return self.others

    def events(self, run: JobKey) -> tuple[JobEvent, ...]:
        events, self.pending_events = self.pending_events, ()
        return events

    def authority_pem(self) -> str:
        return self.known_by


class Site:
    """A reconciler between an API server and a coordinator."""

    def __init__(
        self,
        document: Document | None = None,
        cluster: KeptObjects | None = None,
        settings: Settings = SETTINGS,
    ) -> None:
        self.cluster = cluster or KeptObjects()
        self.name = NAME
        self.store = ClusterStore()
        self.runs = NoWorkers()
        self.time_s = 0.0
        if document is not None:
            self.change(document)
        else:
            for (kind, _), kept in self.cluster.objects.items():
                if kind in WATCHED:
                    self.store.put(kind, copy.deepcopy(kept))
        self._reconciler = Reconciler(
            cluster=self.cluster,
            store=self.store,
            runs=self.runs,
            settings=settings,
            events=EventRecorder(self.cluster),
            namespace="dlion-system",
            now=lambda: datetime(2026, 1, 31, 12, tzinfo=UTC),
            monotonic_s=lambda: self.time_s,
        )

    def change(self, document: Document) -> None:
        """Write a manifest or an object; the watch by our label reports it."""
        kept, kind = self.cluster._keep(document), Kind.of(document)
        if kind is Kind.DLION_JOB or JOB_LABEL in kept["metadata"].get("labels", {}):
            self.store.put(kind, kept)

    def lose(self, kind: Kind, name: str) -> None:
        """Delete that object; the watch reports it."""
        gone = self.cluster.objects.pop((kind, name))
        self.cluster._version += 1
        gone["metadata"]["resourceVersion"] = str(self.cluster._version)
        self.store.remove(kind, gone)

    def relabel(self, kind: Kind, name: str, labels: dict[str, str | None]) -> None:
        """Change labels of a child; the watch by our label reports the change as a real one
        would."""
        before = self.cluster.objects[kind, name]
        after = self.cluster._keep(_merged(before, {"metadata": {"labels": labels}}))
        if JOB_LABEL in after["metadata"]["labels"]:
            self.store.put(kind, after)
        else:  # as it was, at the version at which it went
            gone = copy.deepcopy(before)
            gone["metadata"]["resourceVersion"] = after["metadata"]["resourceVersion"]
            self.store.remove(kind, gone)

    def look(self) -> float | None:
        """Reconcile once; earlier requests are forgotten."""
        self.cluster.requests.clear()
        return asyncio.run(self._reconciler.reconcile(NAME))

    def reset(self) -> None:
        """Reset, as if the cluster were another one."""
        self._reconciler.reset()

    def start_pods(self) -> None:
        """Create the pods that the Jobs and the Deployment ask for, running."""
        for (kind, name), made in tuple(self.cluster.objects.items()):
            if kind not in (Kind.JOB, Kind.DEPLOYMENT):
                continue
            for index in range(made["spec"].get("parallelism", 1)):
                labels = dict(made["spec"]["template"]["metadata"]["labels"])
                is_job = kind is Kind.JOB
                self.store.put(
                    Kind.POD,
                    {
                        "metadata": {
                            "name": f"{name}-{index}",
                            "namespace": "default",
                            "uid": f"uid-{name}-{index}",
                            "labels": labels | ({INDEX_LABEL: str(index)} if is_job else {}),
                            "ownerReferences": [
                                {
                                    "kind": "Job" if is_job else "ReplicaSet",
                                    "name": name if is_job else f"{name}-5f",
                                    "uid": made["metadata"]["uid"],
                                }
                            ],
                        },
                        "status": {"phase": "Running"},
                    },
                )

    def status(self) -> dict[str, Any]:
        """The stored status."""
        status: dict[str, Any] = self.cluster.objects[Kind.DLION_JOB, "digits"]["status"]
        return status


def _merged(base: Any, patch: Any) -> Any:
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return patch
    result = {k: v for k, v in base.items() if k not in patch or patch[k] is not None}
    result |= {k: _merged(base.get(k), v) for k, v in patch.items() if v is not None}
    return result

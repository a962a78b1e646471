"""A client for the `DLionJob`s of a cluster, their events and their pods."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dlion_api import cluster_names
from dlion_api.bounds import OBJECT_NAME_FORM
from dlion_api.errors import DataError, DeniedError, UnavailableError
from dlion_api.names import GROUP, KIND, VERSION, JobKey
from dlion_cli.cluster.client import (
    APPLY,
    JSON_PATCH,
    MERGE,
    ClusterClient,
    api_path,
    checked_name,
)
from dlion_cli.cluster.documents import mapping_of, mappings_in

if TYPE_CHECKING:
    from dlion_cli.inputs.program_files import PackedProgram

Document = dict[str, Any]
FIELD_MANAGER: Final = "dlion-cli"
PLURAL: Final = "dlionjobs"
_MAX_NAME_LENGTH: Final = 253
"""Maximum length of an object's name: a DNS subdomain of RFC 1123."""
_API: Final = ("apis", GROUP, VERSION)
_KUEUE_API: Final = ("apis", "kueue.x-k8s.io", "v1beta2")
_EVENTS_PER_PAGE: Final = 500
_MAX_EVENT_PAGES: Final = 200
"""Maximum pages of events that are read in a namespace."""


class RelatedEvents(NamedTuple):
    """Events, oldest first, and the version of the list for a watch."""

    items: list[Document]
    version: str


@dataclass(frozen=True)
class JobClient:
    """The jobs of one namespace (`cluster.namespace`)."""

    cluster: ClusterClient

    def in_namespace(self, namespace: str) -> JobClient:
        """The jobs of another namespace, by the same connection."""
        return JobClient(self.cluster.in_namespace(namespace))

    def get(self, name: str) -> Document:
        """One job. Raises: AbsentError, and as `ClusterClient.request`."""
        return self.cluster.get(self._path(name))

    def find(self, name: str) -> Document | None:
        """One job, or None. Raises: AbsentError if the cluster does not know the kind."""
        items = self.list_jobs(f"metadata.name={_checked(name)}")["items"]
        return items[0] if items else None

    def list_jobs(
        self,
        field_selector: str = "",
        *,
        everywhere: bool = False,
        timeout_s: float | None = None,
    ) -> Document:
        """A DLionJobList of this namespace, or of all."""
        path = api_path(*_API, PLURAL) if everywhere else self._path()
        query = {"fieldSelector": field_selector} if field_selector else {}
        answer = self.cluster.get(path, query, timeout_s=timeout_s)
        for item in answer.get("items") or ():
            item.setdefault("apiVersion", f"{GROUP}/{VERSION}")
            item.setdefault("kind", KIND)
        return {**answer, "items": answer.get("items") or []}

    def apply(self, document: Document, *, dry_run: bool, force: bool) -> tuple[Document, bool]:
        """Server-side apply. Returns the stored job, and whether it is new.

        Raises: SpecError if a schema or rule rejects it; DeniedError on a field manager conflict.
        """
        query = {
            "fieldManager": FIELD_MANAGER,
            "fieldValidation": "Strict",
            "force": "true" if force else "false",
        } | ({"dryRun": "All"} if dry_run else {})
        path = self._path(str(document["metadata"]["name"]))
        answer = self.cluster.request(
            "PATCH", path, query=query, body=normalize_numbers(document), content_type=APPLY
        )
        return answer.document, answer.is_new

    def apply_program(
        self, program: PackedProgram, *, owner: Document | None, dry_run: bool
    ) -> None:
        """Server-side apply of a program's ConfigMap, which goes with its job `owner`."""
        reference = None if owner is None else {
            "apiVersion": f"{GROUP}/{VERSION}", "kind": KIND,
            "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"],
        }  # fmt: skip
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        query |= {"dryRun": "All"} if dry_run else {}
        body = program.document(self.cluster.namespace, reference)
        path = self.cluster.core_path("configmaps", program.name)
        self.cluster.request("PATCH", path, query=query, body=body, content_type=APPLY)

    def suspend(self, name: str, suspended: bool) -> Document:
        """Set `spec.suspend` and return the stored job."""
        body = {"spec": {"suspend": suspended}}
        query = {"fieldManager": FIELD_MANAGER}
        return self.cluster.request(
            "PATCH", self._path(name), query=query, body=body, content_type=MERGE
        ).document

    def annotate(
        self, name: str, annotations: Mapping[str, str | None], *, version: str
    ) -> Document:
        """Set annotations (None: remove them) of that version of a job. Return the stored job.

        Raises: DeniedError if the job has changed since, or may not be changed.
        """
        body = {"metadata": {"annotations": dict(annotations), "resourceVersion": version}}
        query = {"fieldManager": FIELD_MANAGER}
        return self.cluster.request(
            "PATCH", self._path(name), query=query, body=body, content_type=MERGE
        ).document

    def scale(self, name: str, changes: Sequence[Mapping[str, Any]], *, dry_run: bool) -> Document:
        """Apply the operations of a JSON patch and return the stored job.

        Raises: SpecError if a rule or a `test` operation refuses it.
        """
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return self.cluster.request(
            "PATCH", self._path(name), query=query, body=list(changes), content_type=JSON_PATCH
        ).document

    def delete(self, name: str, *, uid: str) -> None:
        """Delete the job after its children (foreground); do not wait.

        Raises: UnavailableError without the UID; as `ClusterClient.request`.
        """
        if not uid:
            raise UnavailableError(
                f"{name}: the API server has answered without its UID, so that another job could "
                "be deleted. Check that it is a Kubernetes API server"
            )
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},  # keeps a new job of the same name
        }
        self.cluster.request("DELETE", self._path(name), body=body)

    def watch(self, name: str, version: str, *, within_s: int) -> Iterator[Document]:
        """Watch events of one job after that resource version, for at most `within_s`.

        Raises: as `ClusterClient.stream_lines`.
        """
        selected = {"fieldSelector": f"metadata.name={_checked(name)}"}
        return self._watch(self._path(), selected, version, within_s)

    def _watch(
        self, path: str, selected: Mapping[str, str], version: str, within_s: int
    ) -> Iterator[Document]:
        query = {
            **selected,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(within_s),
        }
        for line in self.cluster.stream_lines(path, query, silence_s=within_s + 15.0):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                return  # truncated line: the caller starts a new watch
            if isinstance(event, dict):
                yield event

    def events(self, name: str, uid: str) -> list[Document]:
        """Events about a job, oldest first; none if they are not accessible: they are optional.

        Those of an earlier job of that name have another UID.
        """
        selector = f"involvedObject.kind={KIND},involvedObject.name={name}"
        try:
            answer = self.cluster.get(self.cluster.core_path("events"), {"fieldSelector": selector})
        except (DeniedError, UnavailableError):
            return []
        found = [
            each
            for each in mappings_in(answer.get("items"))
            if mapping_of(each.get("involvedObject")).get("uid") in (None, uid)
        ]
        return sorted(found, key=event_time)

    def related_events(self, job: Document, run_id: str) -> RelatedEvents:
        """Events about this job and about the objects of that run.

        Reads all events of the namespace by pages, since selectors cannot name several objects.
        Raises: as `ClusterClient.request`, also where events may not be read; DataError if
        they are too many to read.
        """
        path, start = self.cluster.core_path("events"), ""
        found: list[Document] = []
        for _ in range(_MAX_EVENT_PAGES):
            query = {"limit": str(_EVENTS_PER_PAGE)} | ({"continue": start} if start else {})
            answer = self.cluster.get(path, query)
            found += [each for each in mappings_in(answer.get("items"))
                      if is_about(each, job, run_id)]  # fmt: skip
            metadata = mapping_of(answer.get("metadata"))
            version = str(metadata.get("resourceVersion") or "")
            start = str(metadata.get("continue") or "")
            if not start:
                return RelatedEvents(sorted(found, key=event_time), version)
        raise DataError(  # a retry would read as many
            f"namespace {self.cluster.namespace} has more than "
            f"{_MAX_EVENT_PAGES * _EVENTS_PER_PAGE:,} events. Those of the job alone: kubectl get "
            f"events -n {self.cluster.namespace} --field-selector "
            f"involvedObject.name={mapping_of(job.get('metadata')).get('name')}"
        )

    def watch_events(self, version: str, *, within_s: int) -> Iterator[Document]:
        """Watch events of all the namespace's events after that version. Raises: as `watch`."""
        return self._watch(self.cluster.core_path("events"), {}, version, within_s)

    def pods(self, name: str, labels: Mapping[str, str] | None = None) -> list[Document]:
        """Pods of a job with these labels, oldest first."""
        selector = {cluster_names.JOB_LABEL: name, **(labels or {})}
        text = ",".join(f"{key}={value}" for key, value in selector.items())
        answer = self.cluster.get(self.cluster.core_path("pods"), {"labelSelector": text})
        return sorted(
            answer.get("items") or [],
            key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]),
        )

    def dispatch_workload(self, name: str) -> Document:
        """The Workload by which MultiKueue dispatches a job. Raises: as `ClusterClient.request`."""
        workload = cluster_names.dispatched_workload_name(_checked(name))
        path = api_path(*_KUEUE_API, "namespaces", self.cluster.namespace, "workloads", workload)
        return self.cluster.get(path)

    def _path(self, *names: str) -> str:
        names = tuple(map(_checked, names))
        return api_path(*_API, "namespaces", self.cluster.namespace, PLURAL, *names)


def _checked(name: str) -> str:
    """The name. Raises: SpecError if it can be no job's."""
    return checked_name(name, "job", "name", OBJECT_NAME_FORM, _MAX_NAME_LENGTH)


def event_time(event: Document) -> str:
    """When an event last occurred, as sortable text."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return str(next(filter(None, times), ""))


def is_about(event: Document, job: Document, run_id: str) -> bool:
    """Whether an event is about this job, or about an object of that run, by its name.

    An event of an earlier job of that name was created before this job, or has the other's UID.

    >>> job = {"metadata": {"namespace": "ml", "name": "digits", "uid": "u"}}
    >>> run = cluster_names.run_name(JobKey("ml", "digits", "1"))
    >>> pod = {"kind": "Pod", "name": "digits-small" + run.removeprefix("digits") + "-0-x2x7k"}
    >>> is_about({"involvedObject": pod}, job, "1")
    True
    >>> is_about({"involvedObject": pod}, job, "2")
    False
    """
    about, metadata = mapping_of(event.get("involvedObject")), mapping_of(job.get("metadata"))
    namespace, name = str(metadata.get("namespace")), str(metadata.get("name"))
    created = _created(event)
    if created and created < _created(job):
        return False
    kind, object_name = about.get("kind"), str(about.get("name"))
    if kind == KIND:
        return object_name == name and about.get("uid") in (None, metadata.get("uid"))
    if object_name == cluster_names.keeper_claim_name(JobKey(namespace, name, "")):
        return True
    run_hash = cluster_names.run_hash(JobKey(namespace, name, run_id))
    parts = object_name.removeprefix(f"{name}-").split("-")
    return object_name.startswith(f"{name}-") and run_hash in parts


def _created(document: Document) -> str:
    """When it was created, by the API server's clock; empty if that is missing."""
    return str(mapping_of(document.get("metadata")).get("creationTimestamp") or "")


def normalize_numbers(value: Any) -> Any:
    """Convert 2.0 to 2, as kubectl does: the API server rejects 2.0 as an integer.

    >>> normalize_numbers({"minSites": 2.0, "rate": 0.5})
    {'minSites': 2, 'rate': 0.5}
    """
    match value:
        case dict():
            return {key: normalize_numbers(item) for key, item in value.items()}
        case list():
            return [normalize_numbers(item) for item in value]
        case float() if value.is_integer() and abs(value) < 1e15:
            return int(value)
        case _:
            return value

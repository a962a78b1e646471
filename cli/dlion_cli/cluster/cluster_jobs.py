"""A client for the `DLionJob`s of a cluster, their events and their pods."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlion_api import cluster_names
from dlion_api.errors import DeniedError, UnavailableError
from dlion_api.names import GROUP, KIND, VERSION
from dlion_cli.cluster.client import APPLY, MERGE, READ_TIMEOUT_S, ClusterClient, api_path
from dlion_cli.inputs.program_files import PackedProgram

Document = dict[str, Any]
FIELD_MANAGER: Final = "dlion-cli"
PLURAL: Final = "dlionjobs"
_API: Final = ("apis", GROUP, VERSION)


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
        items = self.list_jobs(f"metadata.name={name}")["items"]
        return items[0] if items else None

    def list_jobs(
        self,
        field_selector: str = "",
        *,
        everywhere: bool = False,
        timeout_s: float = READ_TIMEOUT_S,
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

    def delete(self, name: str, *, uid: str) -> None:
        """Delete the job after its children (foreground); do not wait."""
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
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(within_s),
        }
        for line in self.cluster.stream_lines(self._path(), query, silence_s=within_s + 15.0):
            try:
                event = json.loads(line)
            except ValueError:
                return  # truncated line: the caller starts a new watch
            if isinstance(event, dict):
                yield event

    def events(self, name: str) -> list[Document]:
        """Events about a job, oldest first; none if they are not accessible: they are optional."""
        selector = f"involvedObject.kind={KIND},involvedObject.name={name}"
        try:
            answer = self.cluster.get(self.cluster.core_path("events"), {"fieldSelector": selector})
        except (DeniedError, UnavailableError):
            return []
        return sorted(answer.get("items") or [], key=event_time)

    def pods(self, name: str, labels: Mapping[str, str]) -> list[Document]:
        """Pods of a job with these labels, oldest first."""
        selector = {cluster_names.JOB_LABEL: name, **labels}
        text = ",".join(f"{key}={value}" for key, value in selector.items())
        answer = self.cluster.get(self.cluster.core_path("pods"), {"labelSelector": text})
        return sorted(
            answer.get("items") or [],
            key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]),
        )

    def _path(self, *name: str) -> str:
        return api_path(*_API, "namespaces", self.cluster.namespace, PLURAL, *name)


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

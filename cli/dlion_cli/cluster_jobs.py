"""The `DLionJob`s of a cluster, their events and their pods: what each command asks the API server.

Called by the commands that need a cluster. Sends and reads documents; shows nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dlion_api import cluster_names
from dlion_api.errors import DeniedError, UnavailableError
from dlion_api.names import GROUP, KIND, VERSION
from dlion_cli.cluster import APPLY, MERGE, READ_TIMEOUT_S, Cluster, path_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Document = dict[str, Any]
FIELD_MANAGER: Final = "dlion-cli"
PLURAL: Final = "dlionjobs"
_API: Final = ("apis", GROUP, VERSION)


@dataclass(frozen=True)
class Jobs:
    """The jobs of one namespace (`cluster.namespace`)."""

    cluster: Cluster

    def within(self, namespace: str) -> Jobs:
        """The jobs of another namespace, by the same connection."""
        return Jobs(self.cluster.within(namespace))

    def get(self, name: str) -> Document:
        """One job. Raises: AbsentError, and as `Cluster.request` does."""
        return self.cluster.get(self._path(name))

    def find(self, name: str) -> Document | None:
        """One job; None where there is none. Raises: AbsentError where the kind is not known."""
        found = self.listed(f"metadata.name={name}")["items"]
        return found[0] if found else None

    def listed(
        self,
        field_selector: str = "",
        *,
        everywhere: bool = False,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> Document:
        """A DLionJobList of this namespace, or of all."""
        path = path_of(*_API, PLURAL) if everywhere else self._path()
        query = {"fieldSelector": field_selector} if field_selector else {}
        answer = self.cluster.get(path, query, timeout_s=timeout_s)
        for item in answer.get("items") or ():
            item.setdefault("apiVersion", f"{GROUP}/{VERSION}")
            item.setdefault("kind", KIND)
        return {**answer, "items": answer.get("items") or []}

    def apply(self, document: Document, *, dry_run: bool, force: bool) -> tuple[Document, bool]:
        """Server-side apply; the job as it is kept then, and whether it is new.

        Raises: SpecError with what a schema or rule refuses; DeniedError where others have set the
        same fields otherwise.
        """
        query = {
            "fieldManager": FIELD_MANAGER,
            "fieldValidation": "Strict",
            "force": "true" if force else "false",
        } | ({"dryRun": "All"} if dry_run else {})
        path = self._path(str(document["metadata"]["name"]))
        answer = self.cluster.request(
            "PATCH", path, query=query, body=as_sent(document), content_type=APPLY
        )
        return answer.document, answer.is_new

    def suspend(self, name: str, suspended: bool) -> Document:
        """Sets `spec.suspend` and nothing else; the job as it is kept then."""
        body = {"spec": {"suspend": suspended}}
        query = {"fieldManager": FIELD_MANAGER}
        return self.cluster.request(
            "PATCH", self._path(name), query=query, body=body, content_type=MERGE
        ).document

    def delete(self, name: str, *, uid: str) -> None:
        """Asks for the job's end and its children's before it; does not wait.

        The uid, so that a new job of the same name stays.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},
        }
        self.cluster.request("DELETE", self._path(name), body=body)

    def changes(self, name: str, version: str, *, within_s: int) -> Iterator[Document]:
        """Watch events of one job behind that resource version, for `within_s` at most.

        Raises: as `Cluster.lines` does.
        """
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(within_s),
        }
        for line in self.cluster.lines(self._path(), query, silence_s=within_s + 15.0):
            try:
                event = json.loads(line)
            except ValueError:
                return  # cut off in the midst: whoever watches begins anew
            if isinstance(event, dict):
                yield event

    def events(self, name: str) -> list[Document]:
        """The cluster's events about a job, oldest first.

        None where the user may not see them or the server is away: they are an extra.
        """
        selector = f"involvedObject.kind={KIND},involvedObject.name={name}"
        path = path_of("api", "v1", "namespaces", self.cluster.namespace, "events")
        try:
            items = self.cluster.get(path, {"fieldSelector": selector}).get("items") or []
        except (DeniedError, UnavailableError):
            return []
        return sorted(items, key=event_time)

    def pods(self, name: str, labels: Mapping[str, str]) -> list[Document]:
        """This cluster's pods of a job that bear these labels too, in the order of their making."""
        selector = {cluster_names.JOB_LABEL: name, **labels}
        text = ",".join(f"{key}={value}" for key, value in selector.items())
        path = path_of("api", "v1", "namespaces", self.cluster.namespace, "pods")
        items = self.cluster.get(path, {"labelSelector": text}).get("items") or []
        return sorted(
            items, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])
        )

    def _path(self, *name: str) -> str:
        return path_of(*_API, "namespaces", self.cluster.namespace, PLURAL, *name)


def event_time(event: Document) -> str:
    """When an event was last seen, as text that can be compared."""
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("lastTimestamp"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        (event.get("metadata") or {}).get("creationTimestamp"),
    )
    return str(next(filter(None, times), ""))


def as_sent(value: Any) -> Any:
    """A document as kubectl sends it: 2.0 as 2, for an API server takes 2.0 for no integer.

    >>> as_sent({"minSites": 2.0, "rate": 0.5})
    {'minSites': 2, 'rate': 0.5}
    """
    match value:
        case dict():
            return {key: as_sent(item) for key, item in value.items()}
        case list():
            return [as_sent(item) for item in value]
        case float() if value.is_integer() and abs(value) < 1e15:
            return int(value)
        case _:
            return value

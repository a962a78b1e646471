"""The operator's picture of the cluster: what the watches brought, by kind, name and job.

Filled by `handlers` and by `resync`, read by `reconcile`. No I/O. What a write brought back is put
in at once, so that the next look sees it though its event is still on the way.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dlion_api.cluster_names import JOB_LABEL
from dlion_operator.cluster import Document, Kind

MOST_REMEMBERED = 4096
"""Objects that are gone, kept in mind so that late news of them does not bring them back."""


class ObjectName(NamedTuple):
    """Where an object is found."""

    namespace: str
    name: str


class Store:
    """The newest that is known of each object."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[ObjectName, Document]] = defaultdict(dict)
        self._of_job: dict[tuple[Kind, ObjectName], dict[ObjectName, Document]] = defaultdict(dict)
        self._gone: OrderedDict[str, int] = OrderedDict()
        """UID → the version at which it went. An object without our label goes from the watches,
        too: its versions count on, and one that is newer is news of it."""

    def put(self, kind: Kind, document: Document) -> bool:
        """Takes a document in unless a newer one of the same object is known; whether it did."""
        name = name_of(document)
        uid = _uid_of(document)
        if version_of(document) <= self._gone.get(uid, -1):
            return False
        known = self._objects[kind].get(name)
        if known is not None and not is_newer(document, known):
            return False
        self._gone.pop(uid, None)
        if known is not None:
            self._forget(kind, known)
        slim = _slim(document)
        self._objects[kind][name] = slim
        self._of_job[kind, job_of(kind, document)][name] = slim
        return True

    def remove(self, kind: Kind, document: Mapping[str, Any]) -> None:
        """The object is gone; one of the same name that was made since stays, and so does one of
        which newer news has come already."""
        known = self._objects[kind].get(name_of(document))
        if known is not None and _uid_of(known) == _uid_of(document):
            if version_of(known) > version_of(document):
                return
            self._forget(kind, known)
        self._gone[_uid_of(document)] = version_of(document)
        while len(self._gone) > MOST_REMEMBERED:
            self._gone.popitem(last=False)

    def _forget(self, kind: Kind, known: Document) -> None:
        name = name_of(known)
        del self._objects[kind][name]
        key = (kind, job_of(kind, known))
        self._of_job[key].pop(name, None)
        if not self._of_job[key]:
            del self._of_job[key]

    def begin_anew(self, objects: Mapping[Kind, Iterable[Document]]) -> None:
        """Holds these and nothing else, whatever was known: versions count anew."""
        self._objects.clear()
        self._of_job.clear()
        self._gone.clear()
        for kind, documents in objects.items():
            for document in documents:
                self.put(kind, document)

    def newest_version(self, kind: Kind) -> int:
        """The highest version of an object of that kind; 0: there is none."""
        return max(map(version_of, self._objects[kind].values()), default=0)

    def get(self, kind: Kind, name: ObjectName) -> Document | None:
        """The object of that name."""
        return self._objects[kind].get(name)

    def of_job(self, kind: Kind, job: ObjectName) -> tuple[Document, ...]:
        """Objects that bear that job's label, by name."""
        found = self._of_job.get((kind, job), {})
        return tuple(found[name] for name in sorted(found))

    def all(self, kind: Kind) -> tuple[Document, ...]:
        """Every object of that kind."""
        return tuple(self._objects[kind].values())

    def jobs(self) -> Iterator[ObjectName]:
        """Every DLionJob."""
        return iter(tuple(self._objects[Kind.DLION_JOB]))


def name_of(document: Mapping[str, Any]) -> ObjectName:
    """Where that object is found."""
    metadata = document["metadata"]
    return ObjectName(str(metadata["namespace"]), str(metadata["name"]))


def job_of(kind: Kind, document: Mapping[str, Any]) -> ObjectName:
    """The DLionJob that an object belongs to, by its label; of a DLionJob itself."""
    namespace, name = name_of(document)
    if kind is Kind.DLION_JOB:
        return ObjectName(namespace, name)
    labels = document["metadata"].get("labels") or {}
    return ObjectName(namespace, str(labels.get(JOB_LABEL, "")))


def is_newer(document: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether the document is a later state than the known one, or of another object."""
    if _uid_of(document) != _uid_of(known):
        return True
    return version_of(document) > version_of(known)


def version_of(document: Mapping[str, Any]) -> int:
    """Its resource version as a number: etcd's revision, which counts up."""
    return as_number(str(document["metadata"].get("resourceVersion", "")))


def as_number(resource_version: str) -> int:
    """That version as a number; 0: it is none."""
    return int(resource_version) if resource_version.isdecimal() else 0


def _uid_of(document: Mapping[str, Any]) -> str:
    return str(document["metadata"].get("uid"))


def _slim(document: Document) -> Document:
    """Without what nobody here reads and what makes up half of an object."""
    metadata = {k: v for k, v in document["metadata"].items() if k != "managedFields"}
    return {**document, "metadata": metadata}

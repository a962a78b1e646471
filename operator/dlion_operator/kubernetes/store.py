"""The operator's view of the cluster: the watched objects, by kind, name and job. No I/O.

Results of writes are added at once, so that the next pass sees them before their watch event.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dlion_api.cluster_names import JOB_LABEL
from dlion_api.errors import DLionError
from dlion_operator.kubernetes.client import Document, Kind

MAX_REMEMBERED = 4096
"""Deleted objects that are remembered, so that late events do not restore them."""

POD_SPEC = ("nodeName",)
"""Fields of a pod's spec that the operator reads (`plan.observed.PodView`)."""
CONTAINER = ("resources", "restartPolicy")
"""Fields of a Workload's containers that the operator reads (`quantities.pod_requests`), which also
reads the resources of the whole pod."""
METADATA_ONLY = frozenset({Kind.CLAIM, Kind.NETWORK_POLICY})
"""Kinds of which the operator reads no more than that they exist, and whose they are."""

MAX_SHARED_TEXT = 64
"""Characters: longer texts are seldom equal."""


class ObjectName(NamedTuple):
    namespace: str
    name: str


class ClusterStore:
    """The latest known version of each object."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[ObjectName, Document]] = defaultdict(dict)
        self._of_job: dict[tuple[Kind, ObjectName], dict[ObjectName, Document]] = defaultdict(dict)
        self._gone: OrderedDict[str, int] = OrderedDict()
        """UID → resource version at deletion. An object that loses our label looks deleted, too; a
        newer version of it is an update."""
        self.unlisted: dict[Kind, DLionError] = {}
        """Kinds that could not be listed, and why. What is known of them may be out of date."""

    def put(self, kind: Kind, document: Document) -> bool:
        """Store a document unless a newer version is known. Return whether it was stored."""
        if not self.is_news(kind, document):
            return False
        name = name_of(document)
        known = self._objects[kind].get(name)
        self._gone.pop(_uid_of(document), None)
        if known is not None:
            self._forget(kind, known)
        slim = _slim(kind, document)
        self._objects[kind][name] = slim
        self._of_job[kind, job_of(kind, document)][name] = slim
        return True

    def is_news(self, kind: Kind, document: Mapping[str, Any]) -> bool:
        """Whether that version of the object is later than all that is known of it."""
        if version_of(document) <= self._gone.get(_uid_of(document), -1):
            return False
        known = self._objects[kind].get(name_of(document))
        return known is None or is_newer(document, known)

    def remove(self, kind: Kind, document: Mapping[str, Any]) -> None:
        """Remove a deleted object. A newer version, or a new object of the same name, stays."""
        known = self._objects[kind].get(name_of(document))
        if known is not None and _uid_of(known) == _uid_of(document):
            if version_of(known) > version_of(document):
                return
            self._forget(kind, known)
        self._gone[_uid_of(document)] = version_of(document)
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def _forget(self, kind: Kind, known: Document) -> None:
        name = name_of(known)
        del self._objects[kind][name]
        key = (kind, job_of(kind, known))
        self._of_job[key].pop(name, None)
        if not self._of_job[key]:
            del self._of_job[key]

    def replace_all(self, objects: Mapping[Kind, Iterable[Document]]) -> None:
        """Replace all objects, whatever their versions."""
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
        return self._objects[kind].get(name)

    def of_job(self, kind: Kind, job: ObjectName) -> tuple[Document, ...]:
        objects = self._of_job.get((kind, job), {})
        return tuple(objects[name] for name in sorted(objects))

    def all(self, kind: Kind) -> tuple[Document, ...]:
        return tuple(self._objects[kind].values())

    def jobs(self) -> Iterator[ObjectName]:
        return iter(tuple(self._objects[Kind.DLION_JOB]))


def _slim(kind: Kind, document: Document) -> Document:
    """The object without what the operator does not read: `managedFields`, half of an object; of
    pods, most of all objects, all of the spec but the node; of Workloads most of their pod
    templates. Thousands of objects share the names of their fields and most of their values: each
    of these texts is kept once."""
    metadata = {k: v for k, v in document["metadata"].items() if k != "managedFields"}
    slim = {**document, "metadata": metadata}
    if kind in METADATA_ONLY:
        slim = {k: v for k, v in slim.items() if k not in ("spec", "status")}
    if kind is Kind.POD and "spec" in document:
        slim["spec"] = _chosen(document["spec"], POD_SPEC)
    if kind is Kind.WORKLOAD and "podSets" in document.get("spec", {}):
        pod_sets = [_slim_pod_set(each) for each in document["spec"]["podSets"]]
        slim["spec"] = {**document["spec"], "podSets": pod_sets}
    made: Document = _with_shared_texts(slim)
    return made


def _slim_pod_set(pod_set: Document) -> Document:
    spec = pod_set.get("template", {}).get("spec", {})
    kept = {
        part: [_chosen(container, CONTAINER) for container in spec[part]]
        for part in ("initContainers", "containers")
        if spec.get(part)
    }
    return {**pod_set, "template": {"spec": {**_chosen(spec, ("resources",)), **kept}}}


def _chosen(document: Document, fields: Collection[str]) -> Document:
    return {name: value for name, value in document.items() if name in fields}


def _with_shared_texts(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {sys.intern(key): _with_shared_texts(each) for key, each in value.items()}
    if kind is list:
        return [_with_shared_texts(each) for each in value]
    return sys.intern(value) if kind is str and len(value) <= MAX_SHARED_TEXT else value


def name_of(document: Mapping[str, Any]) -> ObjectName:
    metadata = document["metadata"]
    return ObjectName(str(metadata["namespace"]), str(metadata["name"]))


def job_of(kind: Kind, document: Mapping[str, Any]) -> ObjectName:
    """The DLionJob that an object belongs to, by its label; for a DLionJob itself."""
    namespace, name = name_of(document)
    if kind is Kind.DLION_JOB:
        return ObjectName(namespace, name)
    labels = document["metadata"].get("labels") or {}
    return ObjectName(namespace, str(labels.get(JOB_LABEL, "")))


def owner_uids(document: Mapping[str, Any]) -> set[str]:
    references = document["metadata"].get("ownerReferences") or ()
    return {str(reference.get("uid")) for reference in references}


def is_newer(document: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Whether the document is a later version than the known one, or another object."""
    if _uid_of(document) != _uid_of(known):
        return True
    return version_of(document) > version_of(known)


def version_of(document: Mapping[str, Any]) -> int:
    """Its resource version as a number: etcd's revision, which only increases."""
    return as_number(str(document["metadata"].get("resourceVersion", "")))


def as_number(resource_version: str) -> int:
    """The version as a number; 0: it is not one."""
    return int(resource_version) if resource_version.isdecimal() else 0


def _uid_of(document: Mapping[str, Any]) -> str:
    return str(document["metadata"].get("uid"))

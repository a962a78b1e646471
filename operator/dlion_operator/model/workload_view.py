"""Views of Kueue's objects, which other programs write. Pure.

Nothing here trusts their form beyond what Kubernetes guarantees: unknown fields, pod sets and
conditions are ignored, and a malformed value counts as absent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlion_api import cluster_names as names
from dlion_operator.model.job_view import Document, ObjectView, condition, is_true
from dlion_operator.model.placement import Placement

ADMITTED, QUOTA_RESERVED, EVICTED, FINISHED, REQUEUED, PODS_READY = (
    "Admitted", "QuotaReserved", "Evicted", "Finished", "Requeued", "PodsReady"
)  # fmt: skip
"""Types of a Workload's conditions."""


@dataclass(frozen=True)
class PriorityOfQueue:
    """The priority of a Workload, and the class that gives it."""

    group: str
    kind: str
    name: str
    value: int


class WorkloadView(ObjectView):
    @property
    def version(self) -> str:
        """Its resource version. A patch with it fails if another program has written meanwhile."""
        return str(self.document["metadata"].get("resourceVersion", ""))

    @property
    def digest(self) -> str:
        """Digest of the spec that the operator created it with."""
        return str(self.annotations.get(names.WORKLOAD_ANNOTATION, ""))

    @property
    def has_quota(self) -> bool:
        """Whether Kueue reserves quota for it, even if it is evicted. Its pod sets cannot change
        then."""
        return is_true(self.document, QUOTA_RESERVED)

    @property
    def admitted_since(self) -> str:
        """When it was admitted last, as Kubernetes writes it."""
        return str(condition(self.document, ADMITTED).get("lastTransitionTime") or "")

    @property
    def cluster(self) -> str:
        """The worker cluster to which MultiKueue has dispatched its job. Empty: none now."""
        name = self._status.get("clusterName")
        return name if isinstance(name, str) else ""

    @property
    def is_evicted(self) -> bool:
        """Whether Kueue wants its pods to end. It counts them until the operator clears the
        reservation."""
        return is_true(self.document, EVICTED)

    @property
    def is_finished(self) -> bool:
        return is_true(self.document, FINISHED)

    @property
    def is_active(self) -> bool:
        """False: it is never admitted until a user sets `spec.active`."""
        return self._spec.get("active") is not False

    @property
    def priority(self) -> PriorityOfQueue | None:
        """Its priority, if a class gives it."""
        found, value = _texts(self._spec.get("priorityClassRef")), self._spec.get("priority")
        if not found or not isinstance(value, int):
            return None
        group, kind, name = (found.get(each, "") for each in ("group", "kind", "name"))
        return PriorityOfQueue(group, kind, name, value)

    @property
    def may_run(self) -> bool:
        """Whether its pods may run now."""
        is_admitted = self.has_quota and is_true(self.document, ADMITTED)
        return is_admitted and not (self.is_evicted or self.is_finished) and self.is_active

    @property
    def reason(self) -> str:
        """Why it does not run, in Kueue's words. Empty: unknown."""
        quota, evicted = (condition(self.document, each) for each in (QUOTA_RESERVED, EVICTED))
        admitted = condition(self.document, ADMITTED)
        if self.is_evicted and (self.has_quota or not self.is_active):
            return f"{evicted.get('reason', EVICTED)}: {evicted.get('message', '')}"
        waiting = admitted if self.has_quota else quota
        return str(waiting.get("message") or "") if waiting.get("status") == "False" else ""

    def admitted_count(self, pod_set: str) -> int | None:
        """Number of pods of that set for which quota is reserved. None: not known."""
        count = self._assignment(pod_set).get("count") if self.has_quota else None
        return count if isinstance(count, int) and not isinstance(count, bool) else None

    def pod_spec(self, pod_set: str) -> Document | None:
        """The spec of that set's pods. None: it has no such set."""
        sets = _mappings(self._spec.get("podSets"))
        found = next((each for each in sets if each.get("name") == pod_set), {})
        template = found.get("template")
        spec = template.get("spec") if isinstance(template, Mapping) else None
        return spec if isinstance(spec, Mapping) else None

    def flavors(self, pod_set: str) -> list[str]:
        """Names of the ResourceFlavors that are assigned to that set."""
        flavors = self._assignment(pod_set).get("flavors")
        return sorted(set(_texts(flavors).values()))

    @property
    def all_flavors(self) -> list[str]:
        """Flavors of all sets."""
        found = {
            name for each in self._assignments() for name in _texts(each.get("flavors")).values()
        }
        return sorted(found)

    def updates(self, pod_set: str) -> Iterator[Placement]:
        """What admission checks add to the pods of that set."""
        for check in _mappings(self._status.get("admissionChecks")):
            for update in _mappings(check.get("podSetUpdates")):
                if update.get("name") == pod_set:
                    yield Placement(
                        node_selector=_texts(update.get("nodeSelector")),
                        tolerations=tuple(_mappings(update.get("tolerations"))),
                        labels=_texts(update.get("labels")),
                        annotations=_texts(update.get("annotations")),
                    )

    def _assignments(self) -> list[Document]:
        admission = self._status.get("admission")
        given = admission.get("podSetAssignments") if isinstance(admission, Mapping) else ()
        return _mappings(given)

    def _assignment(self, pod_set: str) -> Document:
        return next((each for each in self._assignments() if each.get("name") == pod_set), {})


@dataclass(frozen=True)
class QueueState:
    """The known state of a queued job's admission."""

    workload: Document | None = None
    """None: it does not exist, or could not be read."""
    is_prebuilt: bool = False
    """Whether MultiKueue makes and deletes it, not the operator."""
    problem: str = ""
    """Why nothing can be decided now. Empty: nothing prevents it."""
    priority: PriorityOfQueue | None = None
    """None: the job names no class, or its Workload has quota already."""
    flavors: Mapping[str, Document] = field(default_factory=dict)
    """The assigned ResourceFlavors, by name."""

    @property
    def view(self) -> WorkloadView | None:
        return None if self.workload is None else WorkloadView(self.workload)

    @property
    def may_run(self) -> bool:
        view = self.view
        return not self.problem and view is not None and view.may_run

    @property
    def must_stop(self) -> bool:
        """Whether its pods must not run. False with `may_run` False: not known."""
        view = self.view
        return not self.problem if view is None else not view.may_run

    def placement(self, pod_set: str) -> Placement:
        """What the admission adds to the pods of that set.

        Raises: ValueError if flavors and admission checks contradict each other.
        """
        view = self.view
        result = Placement()
        if view is None:
            return result
        for name in view.flavors(pod_set):
            spec = self.flavors.get(name, {}).get("spec")
            given = spec if isinstance(spec, Mapping) else {}
            labels, tolerations = given.get("nodeLabels"), given.get("tolerations")
            result = result.merged(
                Placement(node_selector=_texts(labels), tolerations=tuple(_mappings(tolerations)))
            )
        for update in view.updates(pod_set):
            result = result.merged(update)
        return result


def _texts(value: object) -> dict[str, str]:
    """The entries of a mapping of texts. Empty: it is none."""
    if not isinstance(value, Mapping):
        return {}
    return {name: text for name, text in value.items() if isinstance(text, str)}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    """The mappings in a list. Empty: it is none."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [each for each in value if isinstance(each, Mapping)]

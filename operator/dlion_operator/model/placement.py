"""What a queue's admission adds to a pod template, and how to take it back. Pure.

Of a suspended Job without a start time Kubernetes lets these parts of the template change: node
selector, tolerations, labels and annotations.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dlion_api.cluster_names import PLACEMENT_ANNOTATION

Document = dict[str, Any]


@dataclass(frozen=True)
class Placement:
    """Parts of a pod template."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_template(cls, template: Mapping[str, Any]) -> "Placement":
        metadata, spec = template.get("metadata") or {}, template["spec"]
        return cls(
            node_selector=dict(spec.get("nodeSelector") or {}),
            tolerations=tuple(spec.get("tolerations") or ()),
            labels=dict(metadata.get("labels") or {}),
            annotations=dict(metadata.get("annotations") or {}),
        )

    def merged(self, other: "Placement") -> "Placement":
        """Return both. Raises: ValueError if they give one key different values."""
        new = (each for each in other.tolerations if each not in self.tolerations)
        return Placement(
            node_selector=_united("nodeSelector", self.node_selector, other.node_selector),
            tolerations=(*self.tolerations, *new),
            labels=_united("labels", self.labels, other.labels),
            annotations=_united("annotations", self.annotations, other.annotations),
        )


@dataclass(frozen=True)
class _KeptPlacement:
    """What was added to a template, and the same parts before that, for a later admission."""

    added: Placement
    base: Placement

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "_KeptPlacement":
        """Read it from a Job or Deployment. Without a valid annotation nothing was added."""
        annotations = document["metadata"].get("annotations") or {}
        try:
            values = json.loads(annotations.get(PLACEMENT_ANNOTATION, ""))
            return cls(_parsed(values["added"]), _parsed(values["base"]))
        except (ValueError, TypeError, KeyError, RecursionError):  # annotations can be edited
            return cls(Placement(), Placement.of_template(document["spec"]["template"]))

    def annotation(self) -> dict[str, str]:
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return {PLACEMENT_ANNOTATION: text}


def _parsed(values: Mapping[str, Any]) -> Placement:
    maps = {name: dict(values[name]) for name in ("node_selector", "labels", "annotations")}
    return Placement(**maps, tolerations=tuple(dict(each) for each in values["tolerations"]))


def placed(document: Mapping[str, Any], placement: Placement) -> Document:
    """Return a rendered Job or Deployment with that placement.

    Raises: ValueError if it contradicts the pod template.
    """
    metadata, template = document["metadata"], document["spec"]["template"]
    base = Placement.of_template(template)
    both = base.merged(placement)
    if both == base:
        return dict(document)
    own = metadata.get("annotations") or {}
    annotations = own | _KeptPlacement(placement, base).annotation()
    pods = {"labels": dict(both.labels), "annotations": dict(both.annotations)}
    spec = {"nodeSelector": dict(both.node_selector), "tolerations": list(both.tolerations)}
    made = {
        "metadata": {**(template.get("metadata") or {}), **pods},
        "spec": {**template["spec"], **spec},
    }
    return {
        **document,
        "metadata": {**metadata, "annotations": annotations},
        "spec": {**document["spec"], "template": made},
    }


def unplaced_template(document: Mapping[str, Any]) -> Document:
    """Return the pod template of a Job or Deployment without what an admission has added to it."""
    template, base = document["spec"]["template"], _KeptPlacement.of(document).base
    pods = {"labels": dict(base.labels), "annotations": dict(base.annotations)}
    spec = {"nodeSelector": dict(base.node_selector), "tolerations": list(base.tolerations)}
    return {
        "metadata": {**(template.get("metadata") or {}), **pods},
        "spec": {**template["spec"], **spec},
    }


def placement_patch(document: Mapping[str, Any], placement: Placement) -> Document:
    """Return the merge patch that gives a Job or Deployment that placement, in place of an earlier
    one. Empty: it has it.

    Raises: ValueError if it contradicts the pod template.
    """
    kept, now = _KeptPlacement.of(document), Placement.of_template(document["spec"]["template"])
    wanted = kept.base.merged(placement)
    if wanted == now:
        return {}
    return {
        "metadata": {"annotations": _KeptPlacement(placement, kept.base).annotation()},
        "spec": {
            "template": {
                "metadata": {
                    "labels": _changes(now.labels, wanted.labels),
                    "annotations": _changes(now.annotations, wanted.annotations),
                },
                "spec": {
                    "nodeSelector": _changes(now.node_selector, wanted.node_selector),
                    "tolerations": list(wanted.tolerations),
                },
            }
        },
    }


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> Document:
    """The merge patch of a mapping of texts."""
    return {**new, **{name: None for name in old if name not in new}}


def _united(what: str, a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, str]:
    for name in sorted(a.keys() & b.keys()):
        if a[name] != b[name]:
            raise ValueError(f"{what} {name} is {a[name]!r:.80} and must become {b[name]!r:.80}")
    return {**a, **b}

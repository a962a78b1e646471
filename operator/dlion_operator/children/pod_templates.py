"""A worker's pod: what the operator renders, under the job's podTemplate and then its group's.

Pure. The operator's labels and tolerations stay: it finds its pods by those labels, and recovers
from dead nodes by those tolerations.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dlion_api.spec import Job
from dlion_api.spec.sites import Group
from dlion_operator.children.labels import inherited
from dlion_operator.children.strategic_merge import merged
from dlion_operator.kubernetes.client import Document

_PARTS = ("metadata", "spec")


def worker_template(
    job: Job, group: Group, rendered: Mapping[str, Any], labels: Mapping[str, str]
) -> Document:
    """Return the pod template of a group, with that spec and the operator's own `labels`.

    Raises: ValueError, TypeError or AttributeError if a podTemplate is malformed.
    """
    given = [_parts_of(each) for each in (job.spec.pod_template, group.pod_template) if each]
    metadata: Document = {"labels": inherited(job.metadata.labels)}
    for each in given:
        metadata = merged(metadata, each["metadata"])
    made: Document = {"labels": {**(metadata.get("labels") or {}), **labels}}
    if annotations := metadata.get("annotations"):
        made["annotations"] = annotations
    return {"metadata": made, "spec": _spec(rendered, (each["spec"] for each in given))}


def _parts_of(template: Mapping[str, Any]) -> Document:
    if unknown := sorted(template.keys() - set(_PARTS)):
        raise ValueError(f"it has {', '.join(unknown)}; allowed: {' and '.join(_PARTS)}")
    return {part: template.get(part) or {} for part in _PARTS}


def _spec(rendered: Mapping[str, Any], overlays: Iterable[Mapping[str, Any]]) -> Document:
    """Merge the overlays in order. A list of tolerations replaces the earlier overlay's, and the
    rendered ones are added to it."""
    own = rendered["tolerations"]
    spec: Document = {name: value for name, value in rendered.items() if name != "tolerations"}
    for overlay in overlays:
        spec = merged(spec, overlay)
    added = spec.get("tolerations", [])
    # What is no list is for the API server to refuse.
    return {**spec, "tolerations": [*own, *added] if isinstance(added, list) else added}

"""How podTemplates of runtime, job and groups change the pods that the operator renders.

Pure. In order: the rendered pod, the site's DLionRuntime, image, resources and nodeSelector of job
and group, the job's podTemplate, the group's. The operator's labels and tolerations stay: it finds
its pods by those labels, and recovers from dead nodes by those tolerations.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dlion_api.cluster_names import TRAINER_CONTAINER
from dlion_api.spec import Job
from dlion_api.spec.sites import Group
from dlion_operator.children.initializers import downloads, with_templates
from dlion_operator.children.labels import inherited
from dlion_operator.children.pods import resources_of
from dlion_operator.children.strategic_merge import merged
from dlion_operator.kubernetes.client import Document
from dlion_operator.model.settings import Settings
from dlion_operator.model.site_runtime import SiteRuntime

_PARTS = ("metadata", "spec")
_SECRETS = "imagePullSecrets"
_KEEPER_FIELDS: Final[Mapping[str, type]] = {
    "affinity": dict,
    "nodeSelector": dict,
    "priorityClassName": str,
    "runtimeClassName": str,
    "tolerations": list,
    _SECRETS: list,
}
"""What a keeper takes of its job's podTemplate: where and how its pod is scheduled, and its image
fetched. It runs the job's image beside the site's claim, so that users who may create jobs must
never choose its service account, volumes, containers or access to its host as well. Labels and
annotations go to it too, and what the cluster's webhooks make of those is the cluster's choice."""


def worker_template(
    job: Job,
    group: Group,
    rendered: Mapping[str, Any],
    labels: Mapping[str, str],
    scratch_size: str,
    runtime: SiteRuntime | None = None,
) -> Document:
    """Return the pod template of a group, with that spec and the operator's own `labels`.

    `scratch_size`: the limit of an emptyDir without one: a full disk affects the whole node.

    Raises: ValueError, TypeError or AttributeError if a podTemplate is malformed.
    """
    site = _parts_of(_of_runtime(runtime))
    own = [_parts_of(each) for each in (job.spec.pod_template, group.pod_template) if each]
    metadata = merged(site["metadata"], {"labels": inherited(job.metadata.labels)})
    for each in own:
        metadata = merged(metadata, each["metadata"])
    made: Document = {"labels": {**(metadata.get("labels") or {}), **labels}}
    if annotations := metadata.get("annotations"):
        made["annotations"] = annotations
    overlays = (site["spec"], _fields(job, group), *(each["spec"] for each in own))
    spec = _with_limits(_spec(rendered, overlays), scratch_size)
    if downloads(job):
        rendered = with_templates(rendered, spec, job)
        spec = _with_limits(_spec(rendered, overlays), scratch_size)
    # A template that removes the field asks for no token.
    spec.setdefault("automountServiceAccountToken", False)
    return {"metadata": made, "spec": spec}


def _of_runtime(runtime: SiteRuntime | None) -> Mapping[str, Any]:
    return {} if runtime is None else runtime.spec.pod_template or {}


def _fields(job: Job, group: Group) -> Document:
    """The fields of job and group that are parts of a pod, as a patch of it."""
    trainer: Document = {"name": TRAINER_CONTAINER, "resources": resources_of(group.resources)}
    if image := group.image or job.spec.trainer.image:
        trainer["image"] = image
    spec: Document = {"containers": [trainer]}
    return spec | ({"nodeSelector": dict(group.node_selector)} if group.node_selector else {})


def _with_limits(spec: Document, size: str) -> Document:
    volumes = spec.get("volumes")
    if not isinstance(volumes, list):
        return spec
    return {**spec, "volumes": [_limited(volume, size) for volume in volumes]}


def _limited(volume: Any, size: str) -> Any:
    scratch = volume.get("emptyDir") if isinstance(volume, Mapping) else None
    if not isinstance(scratch, Mapping) or scratch.get("sizeLimit") not in (None, "", 0, "0"):
        return volume
    return {**volume, "emptyDir": {**scratch, "sizeLimit": size}}


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
    # What is not a list is for the API server to refuse.
    return {**spec, "tolerations": [*own, *added] if isinstance(added, list) else added}


def keeper_template(
    job: Job, rendered: Mapping[str, Any], labels: Mapping[str, str], settings: Settings
) -> Document:
    """Return the keeper's pod template, with that spec and the operator's own `labels`.

    The site's settings decide where it runs; where they are empty, the job's podTemplate does, and
    before it that of the site's DLionRuntime. Tolerations of the settings and pull Secrets of all
    are added; the job's list of tolerations replaces the runtime's, as for workers. Of a malformed
    podTemplate nothing is taken: `worker_template` reports it, and a running keeper must not depend
    on it.
    """
    keeper = settings.keeper
    metadata: Document = {}
    spec: Document = {_SECRETS: rendered.get(_SECRETS, [])}
    try:
        for each in (_of_runtime(settings.runtime), job.spec.pod_template or {}):
            given = _parts_of(each)
            metadata = merged(metadata, given["metadata"])
            taken = {name: value for name, value in given["spec"].items() if name in _KEEPER_FIELDS}
            spec = merged(spec, taken)
    except (AttributeError, TypeError, ValueError):
        metadata, spec = {}, {}
    spec = {name: spec[name] for name, kind in _KEEPER_FIELDS.items() if _is_a(kind, spec, name)}
    placed: Document = {
        **{name: spec.get(name) for name in _KEEPER_FIELDS},
        "tolerations": [
            *rendered["tolerations"],
            *keeper.tolerations,
            *spec.get("tolerations", ()),
        ],
        "nodeSelector": keeper.node_selector or spec.get("nodeSelector"),
        "affinity": keeper.affinity or _node_affinity(spec.get("affinity", {})),
        "priorityClassName": keeper.priority_class_name or spec.get("priorityClassName"),
    }
    own_labels = inherited(job.metadata.labels) | inherited(_strings(metadata.get("labels")))
    made: Document = {"labels": own_labels | dict(labels)}
    if annotations := inherited(_strings(metadata.get("annotations"))):
        made["annotations"] = annotations
    shown = {name: value for name, value in placed.items() if value}
    return {"metadata": made, "spec": {**rendered, **shown}}


def _is_a(kind: type, spec: Mapping[str, Any], name: str) -> bool:
    return isinstance(spec.get(name), kind)


def _node_affinity(affinity: Mapping[str, Any]) -> Document:
    """Leave out fields about other pods: workers that avoid each other would prevent the keeper
    from running on any node."""
    return {name: value for name, value in affinity.items() if name == "nodeAffinity"}


def _strings(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {name: text for name, text in value.items() if isinstance(text, str)}

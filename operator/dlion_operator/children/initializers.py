"""The init containers that download a worker's data set and model, and the volume that has them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dlion_api import cluster_names as names
from dlion_api.spec import Job
from dlion_api.spec.initializers import Download, Initializer
from dlion_api.spec.sites import Group, Resources
from dlion_operator.children.pods import container, mount
from dlion_operator.kubernetes.client import Document
from dlion_operator.kubernetes.quantities import parse_quantity
from dlion_operator.model.settings import Settings

_USED_SHARE: Final = 0.9
"""Share of the volume's limit that downloads may use: above the limit the kubelet evicts the
pod."""


def downloads(job: Job) -> Mapping[str, Download]:
    """The downloads by the names of their init containers, in the order in which these run."""
    given = job.spec.trainer.initializer
    both = {names.DATASET_INITIALIZER: given.dataset, names.MODEL_INITIALIZER: given.model}
    return {name: download for name, download in both.items() if download is not None}


def initializers(job: Job, group: Group, settings: Settings) -> list[Document]:
    """Return an init container for each download. `with_templates` gives it what the templates
    decide."""
    made = []
    for name, download in downloads(job).items():
        mounts = [mount(names.DOWNLOADS_VOLUME, names.DOWNLOADS_DIR)]
        one = container(name, settings.worker_image, settings, Resources(), mounts=mounts)
        one["terminationMessagePolicy"] = "FallbackToLogsOnError"
        one["env"] += [
            {"name": names.DOWNLOADS_VARIABLE, "value": names.DOWNLOADS_DIR},
            {"name": names.GROUP_VARIABLE, "value": group.name},
            *_credentials(download),
        ]
        made.append(one)
    return made


def with_templates(rendered: Mapping[str, Any], merged: Mapping[str, Any], job: Job) -> Document:
    """Return the rendered pod whose initializers suit the pod that the templates made of it.

    They have its trainer's image, which has certificates, and resources, as the pod requests no
    more with them. They learn its volume's limit; what replaces the volume, as a claim, has none.

    Raises: ValueError, TypeError or AttributeError if a podTemplate is malformed.
    """
    containers = merged.get("containers") or ()
    role = names.TRAINER_CONTAINER
    trainer: Document = next((each for each in containers if each.get("name") == role), {})
    given = {"image": trainer.get("image"), "resources": _without_devices(trainer)}
    limit = _limit_bytes(merged)
    bound = {"name": names.DOWNLOAD_BYTES_VARIABLE, "value": str(limit)}
    own = downloads(job)
    made = [
        {**each, **given, "env": [*each["env"], *([bound] if limit is not None else ())]}
        if each["name"] in own
        else each
        for each in rendered["initContainers"]
    ]
    return {**rendered, "initContainers": made}


def _limit_bytes(pod: Mapping[str, Any]) -> int | None:
    """Maximum bytes of the pod's downloads together. None: they cause no eviction."""
    for volume in pod.get("volumes") or ():
        scratch = volume.get("emptyDir") if volume.get("name") == names.DOWNLOADS_VOLUME else None
        if scratch and scratch.get("sizeLimit"):
            return int(float(parse_quantity(str(scratch["sizeLimit"]))) * _USED_SHARE)
    return None


def with_downloads(trainer: Document, job: Job) -> Document:
    """Return the trainer's container with the volume of downloads, if the job has any."""
    if not downloads(job):
        return trainer
    variable = {"name": names.DOWNLOADS_VARIABLE, "value": names.DOWNLOADS_DIR}
    mounted = mount(names.DOWNLOADS_VOLUME, names.DOWNLOADS_DIR, read_only=True)
    return {
        **trainer,
        "env": [*trainer["env"], variable],
        "volumeMounts": [*trainer["volumeMounts"], mounted],
    }


def downloads_volume(job: Job, settings: Settings) -> list[Document]:
    if not downloads(job):
        return []
    limit = {"sizeLimit": settings.scratch.downloads}
    return [{"name": names.DOWNLOADS_VOLUME, "emptyDir": limit}]


def without_secrets(initializer: Initializer) -> Initializer:
    """Return the same downloads without credentials."""
    return Initializer(
        dataset=initializer.dataset and replace(initializer.dataset, secret_name=""),
        model=initializer.model and replace(initializer.model, secret_name=""),
    )


def _credentials(download: Download) -> list[Document]:
    """Variables from the keys that the Secret has."""
    if not download.secret_name:
        return []
    return [
        {
            "name": variable,
            "valueFrom": {
                "secretKeyRef": {"name": download.secret_name, "key": key, "optional": True}
            },
        }
        for key, variable in names.DOWNLOAD_CREDENTIALS.items()
    ]


def _without_devices(container: Mapping[str, Any]) -> Document:
    """The container's resources. A device is named by a domain and a slash."""
    given = container.get("resources") or {}
    return {
        kind: {name: amount for name, amount in (given.get(kind) or {}).items() if "/" not in name}
        for kind in ("requests", "limits")
        if given.get(kind)
    }

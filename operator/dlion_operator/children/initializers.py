"""The init containers that download a worker's data set and model, and the volume that has them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from dlion_api import cluster_names as names
from dlion_api.spec import Job
from dlion_api.spec.initializers import Download, Initializer
from dlion_api.spec.sites import Group, Resources
from dlion_operator.children.pods import container, mount
from dlion_operator.kubernetes.client import Document
from dlion_operator.kubernetes.quantities import parse_quantity
from dlion_operator.model.settings import Settings

_USED_SHARE: Final = 0.9
"""Of the volume's limit: above the limit the kubelet evicts the pod, whatever it downloads."""


def downloads(job: Job) -> Mapping[str, Download]:
    """The downloads by the names of their init containers, in the order in which these run."""
    given = job.spec.trainer.initializer
    both = {names.DATASET_INITIALIZER: given.dataset, names.MODEL_INITIALIZER: given.model}
    return {name: download for name, download in both.items() if download is not None}


def initializers(job: Job, group: Group, settings: Settings) -> list[Document]:
    """Return an init container for each download.

    It has the trainer's image, which has certificates, and resources, as the pod requests no more
    with them.
    """
    wanted = downloads(job)
    image = group.image or job.spec.trainer.image or settings.worker_image
    made = []
    for name, download in wanted.items():
        mounts = [mount(names.DOWNLOADS_VOLUME, names.DOWNLOADS_DIR)]
        one = container(name, image, settings, _without_devices(group.resources), mounts=mounts)
        one["terminationMessagePolicy"] = "FallbackToLogsOnError"
        most = int(float(parse_quantity(settings.scratch.downloads)) * _USED_SHARE / len(wanted))
        one["env"] += [
            {"name": names.DOWNLOADS_VARIABLE, "value": names.DOWNLOADS_DIR},
            {"name": names.DOWNLOAD_BYTES_VARIABLE, "value": str(most)},
            *_credentials(download),
        ]
        made.append(one)
    return made


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


def _without_devices(resources: Resources) -> Resources:
    """A device is named by a domain and a slash."""
    return Resources(
        requests={name: given for name, given in resources.requests.items() if "/" not in name},
        limits={name: given for name, given in resources.limits.items() if "/" not in name},
    )

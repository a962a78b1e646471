"""A run's keeper at a site: one pod, the only one that mounts the site's volume claim."""

from collections.abc import Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.spec import Job
from dlion_operator.children.pod_templates import keeper_template
from dlion_operator.children.pods import (
    container,
    metadata_of,
    mount,
    pod_spec,
    program_volume,
)
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model.settings import Settings


def keeper_objects(job: Job, settings: Settings, owner: Mapping[str, Any]) -> list[Document]:
    """Return its volume claim (if the operator makes one), its Service and its Deployment."""
    service = Kind.SERVICE.document(
        _metadata(names.keeper_name(job.key), job, settings, owner),
        spec={
            "selector": _labels(job, settings),
            "ports": [{"name": "keeping", "port": names.KEEPER_PORT}],
        },
    )
    objects = [service, _deployment(job, settings, owner)]
    return [_claim(job, settings, owner), *objects] if _makes_claim(settings) else objects


def _deployment(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    volumes, mounts = program_volume(job)
    state = mount("state", names.STATE_DIR)
    if settings.keeper.claim_name:
        # Other jobs may mount that claim too, also an earlier one of this name.
        state["subPath"] = f"{job.key.name}-{owner.get('uid', '')}"
    image = job.spec.trainer.image or settings.worker_image
    keeper = container(
        names.KEEPER_CONTAINER,
        image,
        settings,
        settings.keeper.resources,
        mounts=[state, mount("shared", names.SHARED_DIR), *mounts],
    )
    keeper["ports"] = [{"name": "keeping", "containerPort": names.KEEPER_PORT}]
    keeper["readinessProbe"] = {"tcpSocket": {"port": names.KEEPER_PORT}, "periodSeconds": 5}
    spec = pod_spec(
        settings,
        names.run_name(job.key),
        containers=[keeper],
        volumes=[
            _state(job, settings),
            {"name": "shared", "emptyDir": {"sizeLimit": settings.scratch.shared}},
            *volumes,
        ],
    )
    labels = _labels(job, settings)
    return Kind.DEPLOYMENT.document(
        _metadata(names.keeper_name(job.key), job, settings, owner),
        spec={
            "replicas": 1,
            # Two pods must never write to the same claim.
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": labels},
            "template": keeper_template(job, spec, labels, settings),
        },
    )


def _state(job: Job, settings: Settings) -> Document:
    claim = names.keeper_claim_name(job.key) if _makes_claim(settings) else ""
    if claim := settings.keeper.claim_name or claim:
        return {"name": "state", "persistentVolumeClaim": {"claimName": claim}}
    return {"name": "state", "emptyDir": {"sizeLimit": settings.scratch.state}}


def _makes_claim(settings: Settings) -> bool:
    return bool(settings.keeper.size) and not settings.keeper.claim_name


def _claim(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    spec: Document = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": settings.keeper.size}},
    }
    if settings.keeper.storage_class_name:
        spec["storageClassName"] = settings.keeper.storage_class_name
    metadata = _metadata(names.keeper_claim_name(job.key), job, settings, owner)
    # It outlives the run: the job's next run uses its own folder in it.
    metadata["labels"] = {k: v for k, v in metadata["labels"].items() if k != names.RUN_LABEL}
    return Kind.CLAIM.document(metadata, spec=spec)


def _metadata(name: str, job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    component = {names.COMPONENT_LABEL: names.KEEPER}
    return metadata_of(name, job, owner, site=settings.site, **component)


def _labels(job: Job, settings: Settings) -> dict[str, str]:
    return names.run_labels(job.key, settings.site) | {names.COMPONENT_LABEL: names.KEEPER}

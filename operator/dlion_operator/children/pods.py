"""The common part of a run's pods: user, volumes, mounts and security settings."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.document import to_document
from dlion_api.names import API_VERSION, KIND
from dlion_api.spec import Job
from dlion_api.spec.sites import Resources
from dlion_operator.children.labels import inherited
from dlion_operator.kubernetes.client import Document
from dlion_operator.model.settings import Settings

USER_ID = 65532
GRACE_S = 30
"""Seconds from SIGTERM to SIGKILL; a worker uploads its last checkpoint to the keeper in this
time."""
TOKEN_LIFE_S = 3600
DEAD_NODE_S = 20
"""Seconds from a node's failure taint to the eviction of its pods."""


def owner_of(document: Mapping[str, Any]) -> Document:
    """Return the owner reference that deletes a child with its DLionJob."""
    metadata = document["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def metadata_of(
    name: str, job: Job, owner: Mapping[str, Any], *, site: str, **labels: str
) -> Document:
    """Return metadata of one of the run's objects, with inherited, run and additional labels."""
    return {
        "name": name,
        "namespace": job.key.namespace,
        "labels": inherited(job.metadata.labels) | names.run_labels(job.key, site) | labels,
        "ownerReferences": [dict(owner)],
    }


def pod_spec(
    settings: Settings,
    config_map_name: str,
    *,
    containers: Sequence[Document],
    init_containers: Sequence[Document] = (),
    volumes: Sequence[Document] = (),
) -> Document:
    """Return a pod spec that complies with pod security `restricted`, with the common volumes."""
    common = [
        {"name": "config", "configMap": {"name": config_map_name}},
        {
            "name": "token",
            "projected": {
                "sources": [
                    {
                        "serviceAccountToken": {
                            "audience": names.TOKEN_AUDIENCE,
                            "expirationSeconds": TOKEN_LIFE_S,
                            "path": names.TOKEN_FILE,
                        }
                    }
                ],
                "defaultMode": 0o440,
            },
        },
        {"name": "tmp", "emptyDir": {"sizeLimit": settings.scratch.tmp}},
    ]
    spec: Document = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        # Kubernetes' default would leave them on a dead node for five minutes.
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{trouble}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": DEAD_NODE_S,
            }
            for trouble in ("not-ready", "unreachable")
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [*common, *volumes],
    }
    if init_containers:
        spec["initContainers"] = list(init_containers)
    if settings.images.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in settings.images.pull_secrets]
    return spec


def container(
    role: str, image: str, settings: Settings, resources: Resources, *, mounts: Sequence[Document]
) -> Document:
    """Return a container that runs that role of `dlion_worker.pod`."""
    return {
        "name": role,
        "image": image,
        "imagePullPolicy": settings.images.pull_policy,
        "command": [*names.BLOCK_SIGTERM_COMMAND, "python3", *role_arguments(role)],
        "env": [
            {
                "name": names.POD_IP_VARIABLE,
                "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
            }
        ],
        "resources": resources_of(resources),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            mount("config", names.CONFIG_DIR, read_only=True),
            mount("token", names.TOKEN_DIR, read_only=True),
            mount("tmp", "/tmp"),  # noqa: S108 - an emptyDir of this pod alone
            *mounts,
        ],
    }


def role_arguments(role: str) -> list[str]:
    """Return what Python runs in the container of that role."""
    return ["-m", "dlion_worker.pod", role]


def resources_of(resources: Resources) -> Document:
    """Return a container's resources. A requested device is its own limit, as the API server wants
    both, and equal."""
    devices = {name: amount for name, amount in resources.requests.items() if "/" in name}
    shown = to_document(replace(resources, limits={**devices, **resources.limits}))
    return {name: amounts for name, amounts in shown.items() if amounts}


def mount(volume: str, path: str, *, read_only: bool = False) -> Document:
    return {"name": volume, "mountPath": path} | ({"readOnly": True} if read_only else {})


def program_volume(job: Job) -> tuple[list[Document], list[Document]]:
    """Return volume and mount of the user's program, if it is in a ConfigMap."""
    program = job.spec.trainer.program.config_map
    if program is None:
        return [], []
    volume = {"name": "program", "configMap": {"name": program.name}}
    return [volume], [mount("program", names.PROGRAM_DIR, read_only=True)]

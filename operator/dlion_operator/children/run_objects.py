"""What all pods of a run at a site share: their configuration and their names in DNS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.pod_config import PodConfig
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION, Job
from dlion_operator.children.pods import Document, metadata_of
from dlion_operator.settings import Settings


def config_map(
    job: Job, settings: Settings, owner: Mapping[str, Any], *, authority_pem: str
) -> Document:
    """The run's ConfigMap: what `dlion_worker.pod` reads."""
    key = job.key
    config = PodConfig(
        job_document=_document(job),
        site=settings.site,
        coordinator_address=settings.coordinator.address,
        keeper_address=f"{names.keeper_name(key)}.{key.namespace}.svc:{names.KEEPER_PORT}",
    )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(names.run_name(key), job, owner, site=settings.site),
        "data": {names.POD_CONFIG_KEY: config.to_json(), names.AUTHORITY_KEY: authority_pem},
    }


def to_follow(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> Document | None:
    """What of a run's ConfigMap has to be as the operator that serves it now would make it: where
    its coordinator is, and what that one is known by. None: nothing. All else, the manifest above
    all, stays as the run began."""
    data = there.get("data") or {}
    followed = {
        names.POD_CONFIG_KEY: _followed(data, wanted["data"]),
        names.AUTHORITY_KEY: wanted["data"][names.AUTHORITY_KEY],
    }
    changed = {key: text for key, text in followed.items() if text and text != data.get(key)}
    return changed or None


def _followed(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The pods' configuration with the coordinator's address of now; empty: it cannot be read."""
    text = there.get(names.POD_CONFIG_KEY)
    try:
        values = json.loads(text or "")
        address = json.loads(wanted[names.POD_CONFIG_KEY])["coordinator_address"]
        if values["coordinator_address"] == address:
            return str(text)
        values["coordinator_address"] = address
        return json.dumps(values, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (ValueError, TypeError, KeyError, RecursionError):  # ConfigMaps can be edited
        return ""


def _document(job: Job) -> Document:
    """The manifest without what workers have no use for and may change at any time."""
    document = job.to_document()
    document["metadata"] = {"name": job.key.name, "namespace": job.key.namespace}
    if job.may_grow:
        document["metadata"]["annotations"] = {RANKS_ANNOTATION: BY_GROUP}
    document["spec"].pop("podTemplate", None)
    return document


def headless_service(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    """Gives each worker a name in DNS, also before it is ready: its peers are what it waits for."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(names.run_name(job.key), job, owner, site=settings.site),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.run_labels(job.key, settings.site)
            | {names.COMPONENT_LABEL: names.WORKER},
            "ports": [
                {"name": names.EXCHANGE, "port": names.EXCHANGE_PORT},
                {"name": names.MEASURING, "port": names.MEASURING_PORT},
                {"name": "metrics", "port": names.METRICS_PORT},
            ],
        },
    }

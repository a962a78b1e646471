"""Objects that all pods of a run at a site share: ConfigMap, headless Service, authority; and the
list of all that a run has beside its Jobs."""

import json
from collections.abc import Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import GROUP
from dlion_api.protocol.pod_config import PodConfig
from dlion_api.spec import BY_GROUP, RANKS_ANNOTATION, Job
from dlion_operator.children.keeper import keeper_objects
from dlion_operator.children.labels import inherited
from dlion_operator.children.network_policies import network_policies
from dlion_operator.children.pods import metadata_of
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.model.settings import Settings

CERTIFICATE_DURATION = "2160h"
"""90 days; cert-manager renews it with a third left. Workers' certificates last one day."""


def shared_objects(
    job: Job, settings: Settings, owner: Mapping[str, Any], *, authority_pem: str
) -> list[Document]:
    """Return all objects of a run but its Jobs and those for other sites. No pod starts before
    its NetworkPolicy is there."""
    return [
        *network_policies(job, settings, owner),
        config_map(job, settings, owner, authority_pem=authority_pem),
        headless_service(job, settings, owner),
        *keeper_objects(job, settings, owner),
    ]


def config_map(
    job: Job, settings: Settings, owner: Mapping[str, Any], *, authority_pem: str
) -> Document:
    """Return the run's ConfigMap, which `dlion_worker.pod` reads."""
    key = job.key
    config = PodConfig(
        job_document=_document(job, str(owner.get("uid", ""))),
        site=settings.site,
        coordinator_address=settings.coordinator.address,
        keeper_address=f"{names.keeper_name(key)}.{key.namespace}.svc:{names.KEEPER_PORT}",
    )
    return Kind.CONFIG_MAP.document(
        metadata_of(names.run_name(key), job, owner, site=settings.site),
        data={names.POD_CONFIG_KEY: config.to_json(), names.AUTHORITY_KEY: authority_pem},
    )


def config_map_changes(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> Document | None:
    """Return the changes that a run's ConfigMap needs for the current operator; None: none.

    Only the coordinator's address and CA bundle may change. The rest, such as the manifest, stays
    as the run began.
    """
    data = there.get("data") or {}
    followed = {
        names.POD_CONFIG_KEY: _followed(data, wanted["data"]),
        names.AUTHORITY_KEY: wanted["data"][names.AUTHORITY_KEY],
    }
    changed = {key: text for key, text in followed.items() if text and text != data.get(key)}
    return changed or None


def _followed(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the pods' configuration with the current coordinator address; empty: unreadable."""
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


def _document(job: Job, uid: str) -> Document:
    """Return the manifest with the job's UID at this site, and without the fields that workers do
    not use and that may change."""
    document = job.to_document()
    document["metadata"] = {"name": job.key.name, "namespace": job.key.namespace, "uid": uid}
    if job.may_grow:
        document["metadata"]["annotations"] = {RANKS_ANNOTATION: BY_GROUP}
    document["spec"].pop("runtime")  # the operator's alone; older images do not know it
    for owner in (document["spec"], *_groups(document)):
        owner.pop("podTemplate", None)
    return document


def _groups(document: Mapping[str, Any]) -> list[Document]:
    return [group for site in document["spec"]["sites"] for group in site["groups"]]


def headless_service(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    """Return the Service that gives each worker a DNS name, even before it is ready.

    A worker becomes ready only after it has reached its peers.
    """
    labels = names.run_labels(job.key, settings.site) | {names.COMPONENT_LABEL: names.WORKER}
    return Kind.SERVICE.document(
        metadata_of(names.run_name(job.key), job, owner, site=settings.site),
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [
                {"name": names.EXCHANGE, "port": names.EXCHANGE_PORT},
                {"name": names.MEASURING, "port": names.MEASURING_PORT},
                {"name": "metrics", "port": names.METRICS_PORT},
            ],
        },
    )


def authority_certificate(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    """Return the Certificate from which cert-manager creates the Secret with the job's authority.

    It is for all runs of the job at this site.
    """
    name = names.authority_name(job.key)
    own_labels = {names.MANAGED_BY_LABEL: names.MANAGER, names.JOB_LABEL: job.key.name}
    labels = inherited(job.metadata.labels) | own_labels
    metadata = metadata_of(name, job, owner, site=settings.site)
    del metadata["labels"][names.RUN_LABEL]
    issuer = {
        "group": "cert-manager.io",
        "kind": job.spec.tls.issuer_kind,
        "name": job.spec.tls.issuer_name,
    }
    return Kind.CERTIFICATE.document(
        metadata,
        spec={
            "isCA": True,
            "commonName": f"{job.key.name} {GROUP}",
            "subject": {"organizations": [f"dlion site {settings.site}"]},
            "secretName": name,
            "secretTemplate": {"labels": labels},
            "duration": CERTIFICATE_DURATION,
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            "usages": ["cert sign", "crl sign"],
            "issuerRef": issuer,
        },
    )

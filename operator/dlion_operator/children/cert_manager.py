"""The Certificate from which cert-manager creates a job's authority at this site."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.names import GROUP
from dlion_api.spec import Job
from dlion_operator.children.inherited_labels import inherited
from dlion_operator.children.pods import Document, metadata_of
from dlion_operator.model.settings import Settings

CERT_MANAGER = "cert-manager.io"
DURATION = "2160h"
"""90 days; cert-manager renews it with a third left. Workers' certificates last one day."""


def authority_certificate(job: Job, settings: Settings, owner: Mapping[str, Any]) -> Document:
    """Return the Certificate for all runs of the job; cert-manager creates its Secret."""
    name = names.authority_name(job.key)
    own_labels = {names.MANAGED_BY_LABEL: names.MANAGER, names.JOB_LABEL: job.key.name}
    labels = inherited(job.metadata.labels) | own_labels
    metadata = metadata_of(name, job, owner, site=settings.site)
    del metadata["labels"][names.RUN_LABEL]
    return {
        "apiVersion": f"{CERT_MANAGER}/v1",
        "kind": "Certificate",
        "metadata": metadata,
        "spec": {
            "isCA": True,
            "commonName": f"{job.key.name} {GROUP}",
            "subject": {"organizations": [f"dlion site {settings.site}"]},
            "secretName": name,
            "secretTemplate": {"labels": labels},
            "duration": DURATION,
            "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
            "usages": ["cert sign", "crl sign"],
            "issuerRef": {
                "group": CERT_MANAGER,
                "kind": job.spec.tls.issuer_kind,
                "name": job.spec.tls.issuer_name,
            },
        },
    }

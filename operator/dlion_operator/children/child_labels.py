"""The labels by which the operator finds a job's children, and how to restore lost ones. Pure.

The watches only deliver objects with our labels, so a child without them looks deleted.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlion_api import cluster_names as names
from dlion_operator.kubernetes.client import Document

_OUR_LABELS = (
    names.NAME_LABEL,
    names.COMPONENT_LABEL,
    names.MANAGED_BY_LABEL,
    names.JOB_LABEL,
    names.RUN_LABEL,
    names.SITE_LABEL,
    names.GROUP_LABEL,
)


def identifying_labels(document: Document) -> dict[str, str]:
    """The labels of a child that identify it and its job."""
    labels: Mapping[str, str] = document["metadata"].get("labels") or {}
    return {name: labels[name] for name in _OUR_LABELS if name in labels}


def label_patch(live: Document, wanted: Mapping[str, str]) -> Document | None:
    """The patch that restores these labels on `live` and no other object, or None."""
    labels = live["metadata"].get("labels") or {}
    missing = {name: value for name, value in wanted.items() if labels.get(name) != value}
    if not missing:
        return None
    return {"metadata": {"uid": live["metadata"]["uid"], "labels": missing}}

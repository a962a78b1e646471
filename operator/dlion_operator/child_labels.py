"""The labels by which the operator finds a job's children, and what to do where one has lost them.

The watches bring only what bears our labels: a child without them looks like one that was deleted.
Pure. Called by `carrying_out`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlion_api import cluster_names as names
from dlion_operator.cluster import Document

_OURS = (
    names.NAME_LABEL,
    names.COMPONENT_LABEL,
    names.MANAGED_BY_LABEL,
    names.JOB_LABEL,
    names.RUN_LABEL,
    names.SITE_LABEL,
    names.GROUP_LABEL,
)


def identifying(document: Document) -> dict[str, str]:
    """Those labels of a child that say whose it is and what it is."""
    labels: Mapping[str, str] = document["metadata"].get("labels") or {}
    return {name: labels[name] for name in _OURS if name in labels}


def restoring(live: Document, wanted: Mapping[str, str]) -> Document | None:
    """The patch that gives `live`, and no other object, these labels back; None: it has them."""
    labels = live["metadata"].get("labels") or {}
    lacking = {name: value for name, value in wanted.items() if labels.get(name) != value}
    if not lacking:
        return None
    return {"metadata": {"uid": live["metadata"]["uid"], "labels": lacking}}

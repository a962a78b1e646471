"""The labels of a job's children: those that identify them, and those that they inherit. Pure.

The watches only deliver objects with our labels, so a child without them looks deleted.
"""

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
_NEVER_COPIED = (
    "dlion.dev",  # ours
    # Reserved for Kubernetes and its projects, including the labels by which Argo CD, Helm and
    # kubectl track objects (app.kubernetes.io), and the queue (kueue.x-k8s.io): by its label Kueue
    # would admit a child once more.
    "kubernetes.io",
    "k8s.io",
    "x-k8s.io",
    # GitOps tools track applied objects by these. A labelled child that is not in the tool's
    # sources would be pruned.
    "helm.sh",
    "argocd.argoproj.io",
    "fluxcd.io",
    "objectset.rio.cattle.io",
    "fleet.cattle.io",
)
"""Label prefixes, each with its subdomains."""


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


def inherited(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a job's children and their pods inherit, to satisfy label policies.

    No selector may use them. A keeper inherits annotations by the same rule.

    >>> inherited({"team": "vision", "example.org/centre": "7", "helm.sh/chart": "x"})
    {'team': 'vision', 'example.org/centre': '7'}
    """
    return {name: value for name, value in labels.items() if not _is_reserved(name)}


def _is_reserved(name: str) -> bool:
    prefix, slash, _ = name.rpartition("/")
    ends = (prefix == domain or prefix.endswith(f".{domain}") for domain in _NEVER_COPIED)
    return bool(slash) and any(ends)

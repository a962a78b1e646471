"""Labels of a DLionJob that its children and their pods inherit, to satisfy label policies."""

from __future__ import annotations

from collections.abc import Mapping

_NEVER_COPIED = (
    "dlion.dev",  # ours
    # Reserved for Kubernetes and its projects, including the labels by which Argo CD, Helm and
    # kubectl track objects (app.kubernetes.io), and the queue (kueue.x-k8s.io), for Jobs only.
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


def inherited(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a job's children inherit. No selector may use them.

    >>> inherited({"team": "vision", "example.org/centre": "7", "helm.sh/chart": "x"})
    {'team': 'vision', 'example.org/centre': '7'}
    """
    return {name: value for name, value in labels.items() if not _is_reserved(name)}


def _is_reserved(name: str) -> bool:
    prefix, slash, _ = name.rpartition("/")
    ends = (prefix == domain or prefix.endswith(f".{domain}") for domain in _NEVER_COPIED)
    return bool(slash) and any(ends)

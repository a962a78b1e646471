"""Which labels of a DLionJob its children and their pods get, too: so a label policy can be met."""

from __future__ import annotations

from collections.abc import Mapping

_NEVER_COPIED = (
    "dlion.dev",  # ours
    # Reserved for Kubernetes and its projects; among them what Argo CD, Helm and kubectl track
    # their objects by (app.kubernetes.io), and a queue (kueue.x-k8s.io), which goes to Jobs alone.
    "kubernetes.io",
    "k8s.io",
    "x-k8s.io",
    # By these a GitOps tool knows what it has applied. A child that bears one, and is not in the
    # tool's sources, would be pruned.
    "helm.sh",
    "argocd.argoproj.io",
    "fluxcd.io",
    "objectset.rio.cattle.io",
    "fleet.cattle.io",
)
"""The prefixes, with all of their subdomains."""


def inherited(labels: Mapping[str, str]) -> dict[str, str]:
    """Those of a job's labels that its children get; no selector may name one.

    >>> inherited({"team": "vision", "example.org/centre": "7", "helm.sh/chart": "x"})
    {'team': 'vision', 'example.org/centre': '7'}
    """
    return {name: value for name, value in labels.items() if not _is_reserved(name)}


def _is_reserved(name: str) -> bool:
    prefix, slash, _ = name.rpartition("/")
    ends = (prefix == domain or prefix.endswith(f".{domain}") for domain in _NEVER_COPIED)
    return bool(slash) and any(ends)

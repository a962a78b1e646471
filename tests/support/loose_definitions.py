"""Kinds of others, free in form: an API server takes such objects, and nobody acts on them."""

from __future__ import annotations

from typing import Any


def loose_definition(group: str, version: str, kind: str, plural: str) -> dict[str, Any]:
    """A namespaced kind's definition."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural},
            "versions": [{**served, "schema": {"openAPIV3Schema": schema}}],
        },
    }

"""Valid and invalid DLionRuntimes, for the model, the schema and a real API server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RuntimeCase:
    """A spec, and the field that a refusal names."""

    name: str
    spec: Any
    blamed: str = ""
    """The field as the API server writes it; empty if the spec is valid."""
    by_rule: bool = field(default=False)
    """Whether only a CEL rule refuses it."""


def runtime_document(spec: Any, name: str = "edge") -> dict[str, Any]:
    """A DLionRuntime with that spec."""
    return {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionRuntime",
        "metadata": {"name": name},
        "spec": spec,
    }


SIXTEEN = {f"r{i}": 1 for i in range(16)}
ALL = ["image", "nodeSelector", "podTemplate"]

RUNTIME_CASES = (
    RuntimeCase("nothing", {}),
    RuntimeCase("a longest image", {"image": "a" * 512}),
    RuntimeCase("an image that is too long", {"image": "a" * 513}, "spec.image"),
    RuntimeCase("an image that is not text", {"image": 1}, "spec.image"),
    RuntimeCase("any podTemplate", {"podTemplate": {"spec": {"later": [1, {"a": "b"}]}}}),
    RuntimeCase("a podTemplate that is a list", {"podTemplate": []}, "spec.podTemplate"),
    RuntimeCase("namespaces", {"namespaces": ["ml", "a" * 63]}),
    RuntimeCase("a namespace that is none", {"namespaces": ["Ml"]}, "spec.namespaces"),
    RuntimeCase("a namespace twice", {"namespaces": ["ml", "ml"]}, "spec.namespaces"),
    RuntimeCase("256 namespaces", {"namespaces": [f"n{i}" for i in range(256)]}),
    RuntimeCase("257 namespaces", {"namespaces": [f"n{i}" for i in range(257)]}, "spec.namespaces"),
    RuntimeCase("one worker", {"limits": {"maxWorkers": 1}}),
    RuntimeCase("no worker", {"limits": {"maxWorkers": 0}}, "spec.limits.maxWorkers"),
    RuntimeCase("all workers", {"limits": {"maxWorkers": 7992}}),
    RuntimeCase("more workers", {"limits": {"maxWorkers": 7993}}, "spec.limits.maxWorkers"),
    RuntimeCase("resources", {"limits": {"maxResources": {"cpu": 2, "memory": "1.5Gi"}}}),
    RuntimeCase("16 resources", {"limits": {"maxResources": SIXTEEN}}),
    RuntimeCase(
        "17 resources",
        {"limits": {"maxResources": {**SIXTEEN, "more": 1}}},
        "spec.limits.maxResources",
    ),
    RuntimeCase(
        "no quantity", {"limits": {"maxResources": {"cpu": "two"}}}, "spec.limits.maxResources"
    ),
    RuntimeCase("no override", {"limits": {"mayOverride": []}}),
    RuntimeCase("all overrides", {"limits": {"mayOverride": ALL}}),
    RuntimeCase(
        "an override twice", {"limits": {"mayOverride": ["image"] * 2}}, "spec.limits.mayOverride"
    ),
    RuntimeCase(
        "another override", {"limits": {"mayOverride": ["args"]}}, "spec.limits.mayOverride"
    ),
    RuntimeCase(
        "a podTemplate without an image",
        {"limits": {"mayOverride": ["nodeSelector", "podTemplate"]}},
        "spec.limits.mayOverride",
        by_rule=True,
    ),
    RuntimeCase(
        "a podTemplate without a nodeSelector",
        {"limits": {"mayOverride": ["image", "podTemplate"]}},
        "spec.limits.mayOverride",
        by_rule=True,
    ),
)

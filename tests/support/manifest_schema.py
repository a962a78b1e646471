r"""The CRD as a strict JSON schema: how an API server judges a manifest, offline.

Derived from `crds/dlionjob.yaml` alone, never from the model:

- The API server *prunes* fields that the schema does not know, and our parser refuses them. Here
  objects with `properties` (and without x-kubernetes-preserve-unknown-fields) refuse other fields,
  as `kubectl --validate=strict` does.
- `x-kubernetes-list-type` set and map are checked, as the API server does beside the schema.
- Nulls of object fields are dropped first, as the API server does.
- An integral float is an integer (JSON has one kind of number), and NaN is not JSON.
- RE2's `$` is the end of the text, Python's `\Z`.
- apiVersion and kind are fixed, because they route an object to this CRD.

CEL rules are left out: `messages` returns their texts.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml
from jsonschema import validators

if TYPE_CHECKING:
    from collections.abc import Iterator

CRD = Path(__file__).parents[2] / "crds" / "dlionjob.yaml"


def crd() -> dict[str, Any]:
    """The definition in the repository."""
    # The loader in C: each process of the tests loads these thousands of lines several times.
    loaded: dict[str, Any] = yaml.load(CRD.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return loaded


def openapi() -> dict[str, Any]:
    """The schema in the definition."""
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node with its path, from the root down."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def messages(schema: dict[str, Any]) -> set[str]:
    """The messages of all CEL rules."""
    return {
        rule["message"]
        for _, node in nodes(schema)
        for rule in node.get("x-kubernetes-validations", ())
    }


def without_nulls(value: Any, schema: dict[str, Any]) -> Any:
    """The document after the API server has dropped the nulls of fields that the schema knows."""
    if isinstance(value, list):
        return [without_nulls(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    return {
        key: without_nulls(item, known.get(key, others or {}))
        for key, item in value.items()
        if item is not None or not (key in known or others)
    }


def strict_validator() -> Any:
    """A validator as described above; `iter_errors` and `is_valid` take a document."""
    schema = copy.deepcopy(openapi())
    for path, node in nodes(schema):
        whole = node.get("x-kubernetes-preserve-unknown-fields") or path == "metadata"
        if "properties" in node and not whole:
            node["additionalProperties"] = False
        if "pattern" in node:
            node["pattern"] = node["pattern"].removesuffix("$") + r"\Z"
    schema["properties"]["apiVersion"]["enum"] = ["dlion.dev/v1alpha1"]
    schema["properties"]["kind"]["enum"] = ["DLionJob"]
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"]["metadata"]["required"] = ["name"]
    return STRICT(schema)


def accepts(validator: Any, document: Any) -> bool:
    """Whether the document is JSON and the validator accepts it."""
    try:
        json.dumps(document, allow_nan=False)
    except (ValueError, TypeError):
        return False
    return bool(validator.is_valid(without_nulls(document, validator.schema)))


def _list_type(
    _validator: Any, kind: str, instance: Any, schema: dict[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    if kind == "atomic" or not isinstance(instance, list):
        return
    keys = schema.get("x-kubernetes-list-map-keys", ())
    known: list[Any] = []
    for item in instance:
        it = [item.get(key) for key in keys] if kind == "map" and isinstance(item, dict) else item
        if it in known:
            yield jsonschema.ValidationError(f"{it} twice")
        known.append(it)


def _is_integer(_checker: Any, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and abs(value) < 2**63


STRICT = validators.extend(
    jsonschema.Draft4Validator,
    validators={"x-kubernetes-list-type": _list_type},
    type_checker=jsonschema.Draft4Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)

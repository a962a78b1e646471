"""Parts of a cluster's documents; any of them may be missing or of another type."""

from collections.abc import Mapping
from typing import Any

from dlion_api.cluster_names import COMPONENT_LABEL, NAME, NAME_LABEL

OPERATOR_SELECTOR = f"{NAME_LABEL}={NAME},{COMPONENT_LABEL}=operator"


def mapping_of(value: object) -> dict[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings_in(value: object) -> list[dict[str, Any]]:
    """The mappings of a list, with an empty one for any other item; empty for another value."""
    return [mapping_of(item) for item in value] if isinstance(value, list) else []


def without_managed_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """The object without the fields' managers, as kubectl shows it."""
    metadata = mapping_of(document.get("metadata"))
    kept = {name: value for name, value in metadata.items() if name != "managedFields"}
    return {**document, "metadata": kept} if metadata else dict(document)

"""From objects back to documents: defaults filled in, ready for JSON."""

from __future__ import annotations

from typing import Any

from dlion_api.document.shapes import (
    FreeShape,
    ListShape,
    MapShape,
    ObjectShape,
    QuantityShape,
    ScalarShape,
    Shape,
    shape_of,
)


def to_document(document: object, *, hashed_only: bool = False) -> dict[str, Any]:
    """The document that an object stands for; what is absent (None) stays absent.

    With `hashed_only` without the fields that are declared `hashed=False`.
    """
    rendered: dict[str, Any] = render(shape_of(type(document)), document, hashed_only)
    return rendered


def render(shape: Shape, value: Any, hashed_only: bool = False) -> Any:
    """One value of that shape as JSON has it."""
    match shape:
        case ScalarShape() | QuantityShape() | FreeShape():
            return value
        case ListShape(item=item):
            return [render(item, each, hashed_only) for each in value]
        case MapShape(value=item):
            return {key: render(item, each, hashed_only) for key, each in value.items()}
        case ObjectShape(fields=fields):
            return {
                field.name: render(field.shape, getattr(value, field.attribute), hashed_only)
                for field in fields
                if getattr(value, field.attribute) is not None and (field.hashed or not hashed_only)
            }

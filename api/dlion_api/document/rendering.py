"""Convert objects back to documents for JSON, with defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlion_api.document.shapes import (
    FieldShape,
    FreeShape,
    ListShape,
    MapShape,
    ObjectShape,
    QuantityShape,
    ScalarShape,
    Shape,
    shape_of,
)


@dataclass(frozen=True)
class Selection:
    """Selects the fields to render."""

    hashed_only: bool = False
    without_defaults: bool = False

    def takes(self, field: FieldShape, value: Any) -> bool:
        """Whether to render that field with that value."""
        if value is None or (self.hashed_only and not field.hashed):
            return False
        return field.required or not self.without_defaults or value != field.default


ALL = Selection()


def to_document(
    document: object, *, hashed_only: bool = False, without_defaults: bool = False
) -> dict[str, Any]:
    """Return an object's document, without fields that are None.

    `hashed_only` omits fields declared `hashed=False`; `without_defaults` omits optional fields
    that have their default.
    """
    selection = Selection(hashed_only, without_defaults)
    rendered: dict[str, Any] = render(shape_of(type(document)), document, selection)
    return rendered


def render(shape: Shape, value: Any, selection: Selection = ALL) -> Any:
    """Return a value of that shape in its JSON form."""
    match shape:
        case ScalarShape() | QuantityShape() | FreeShape():
            return value
        case ListShape(item=item):
            return [render(item, each, selection) for each in value]
        case MapShape(value=item):
            return {key: render(item, each, selection) for key, each in value.items()}
        case ObjectShape(fields=fields):
            values = ((field, getattr(value, field.attribute)) for field in fields)
            return {
                field.name: render(field.shape, each, selection)
                for field, each in values
                if selection.takes(field, each)
            }

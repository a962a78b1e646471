"""Convert objects back to documents for JSON, with defaults filled in."""

from collections.abc import Callable
from typing import Any

from dlion_api.document import shapes


def to_document(
    document: object, *, hashed_only: bool = False, without_defaults: bool = False
) -> dict[str, Any]:
    """Return an object's document, without fields that are None.

    `hashed_only` omits fields declared `hashed=False`; `without_defaults` omits optional fields
    that have their default.
    """

    def is_taken(field: shapes.Field, value: Any) -> bool:
        if value is None or (hashed_only and not field.declared.hashed):
            return False
        return not (without_defaults and value == field.declared.default)

    rendered: dict[str, Any] = render(shapes.shape_of(type(document)), document, is_taken)
    return rendered


def render(
    shape: shapes.Shape,
    value: Any,
    is_taken: Callable[[shapes.Field, Any], bool] = lambda _field, value: value is not None,
) -> Any:
    """Return a value of that shape in its JSON form, with the fields that are taken."""
    match shape:
        case shapes.Scalar() | shapes.Quantity() | shapes.Free():
            return value
        case shapes.List(item=item):
            return [render(item, each, is_taken) for each in value]
        case shapes.Map(value=item):
            return {key: render(item, each, is_taken) for key, each in value.items()}
        case shapes.Object(fields=fields):
            values = ((field, getattr(value, field.attribute)) for field in fields)
            return {
                field.name: render(field.shape, each, is_taken)
                for field, each in values
                if is_taken(field, each)
            }

"""Generate a document class's structural OpenAPI v3 schema for a CustomResourceDefinition.

Used by the tool that writes `crds/`. Rules become `x-kubernetes-validations`. Defaults are complete
at every level, so that `kubectl explain` shows what an absent object means.
"""

from typing import Any

from dlion_api.document import shapes
from dlion_api.document.declaring import Limits
from dlion_api.document.rendering import render
from dlion_api.document.scalars import MAX_QUANTITY_LENGTH, QUANTITY

Schema = dict[str, Any]
_VALIDATIONS = "x-kubernetes-validations"


def schema(cls: type[Any]) -> Schema:
    """Return the schema of a document class."""
    return _shape(shapes.shape_of(cls))


def _shape(shape: shapes.Shape) -> Schema:
    match shape:
        case shapes.Scalar():
            return _scalar(shape)
        case shapes.Quantity():
            return {
                "anyOf": [{"type": "integer"}, {"type": "string"}],
                "maxLength": MAX_QUANTITY_LENGTH,
                "pattern": f"^(?:{QUANTITY})$",
                "x-kubernetes-int-or-string": True,
            }
        case shapes.Free():
            return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        case shapes.List():
            return _list(shape)
        case shapes.Map(value=value, max_items=most):
            content = {"type": "object", "additionalProperties": _shape(value)}
            return content | _given(maxProperties=most)
        case shapes.Object():
            return _object(shape)


def _scalar(shape: shapes.Scalar) -> Schema:
    result: Schema = {"type": shape.kind}
    if shape.choices:
        return result | {"enum": list(shape.choices)}
    if shape.kind == "string":
        limits = shape.limits
        pattern = None if limits.pattern is None else f"^(?:{limits.pattern})$"
        least = limits.min_length or None
        return result | _given(minLength=least, maxLength=limits.max_length, pattern=pattern)
    if shape.kind == "integer":
        result["format"] = "int64"
    return result | _number_limits(shape.limits)


def _given(**keywords: Any) -> Schema:
    return {name: value for name, value in keywords.items() if value is not None}


def _number_limits(limits: Limits) -> Schema:
    result: Schema = {}
    for name, inclusive, exclusive in (
        ("minimum", limits.minimum, limits.above),
        ("maximum", limits.maximum, limits.below),
    ):
        if inclusive is not None:
            result[name] = inclusive
        elif exclusive is not None:
            result |= {name: exclusive, f"exclusive{name.capitalize()}": True}
    return result


def _list(shape: shapes.List) -> Schema:
    result: Schema = {"type": "array", "items": _shape(shape.item)}
    result |= _given(minItems=shape.min_items or None, maxItems=shape.max_items)
    if shape.key:
        result |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [shape.key]}
    else:
        result["x-kubernetes-list-type"] = "set" if shape.unique else "atomic"
    return result


def _object(shape: shapes.Object) -> Schema:
    result: Schema = {"type": "object", "properties": {f.name: _field(f) for f in shape.fields}}
    required = [f.name for f in shape.fields if f.required]
    rules = [_rule(rule.cel, rule.message, rule.reads[0]) for rule in shape.rules]
    rules += [_rule(rule.cel, rule.message, rule.path) for rule in shape.transitions]
    return result | _given(required=required or None, **{_VALIDATIONS: rules or None})


def _rule(cel: str, message: str, path: str) -> Schema:
    where = {"fieldPath": f".{path}"} if path else {}
    return {"rule": cel, "message": message} | where


def _field(field: shapes.Field) -> Schema:
    result = {"description": description(field)} | _shape(field.shape)
    if field.declared.default is not None and not field.required:
        result["default"] = render(field.shape, field.declared.default)
    return result


def description(field: shapes.Field) -> str:
    """Return a field's documentation with its unit."""
    doc, unit = field.declared.doc, field.declared.unit
    text = doc[:1].upper() + doc[1:]
    return f"{text} In {unit}." if unit else text

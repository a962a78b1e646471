"""Declarative documents: one frozen dataclass defines parser, schema and reference.

From declarations (`setting`, `Limits`, `Rule`) it derives a strict parser that reports all problems
at once, a structural OpenAPI v3 schema with CEL rules, and an explanation for users. Not here:
particular documents (`dlion_api.spec`, `dlion_api.status`), YAML, files.

A document class is a `@dataclass(frozen=True, kw_only=True)` whose attributes are scalars
(`str`, `int`, `float`, `bool`, `Literal[...]`), document classes, `tuple[X, ...]`,
`Mapping[str, X]` or `Mapping[str, Any]` (kept unchanged), each declared with `setting(...)`.
Attributes are snake_case, documents camelCase. `X | None` with `optional(...)` may be absent.
"""

from dlion_api.document.declaring import Limits, optional, setting
from dlion_api.document.explaining import Explanation, explain
from dlion_api.document.parsing import line_of, parse
from dlion_api.document.rendering import to_document
from dlion_api.document.rules import Check, IsValid, Rule, TransitionRule, at_most_one, exactly_one
from dlion_api.document.schemas import schema

__all__ = [
    "Check",
    "Explanation",
    "IsValid",
    "Limits",
    "Rule",
    "TransitionRule",
    "at_most_one",
    "exactly_one",
    "explain",
    "line_of",
    "optional",
    "parse",
    "schema",
    "setting",
    "to_document",
]

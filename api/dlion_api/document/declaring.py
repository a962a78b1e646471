"""Declaration of a document's fields, used by every document class."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

REQUIRED: Final = dataclasses.MISSING
METADATA_KEY: Final = "dlion"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Allowed values of a field, or in `Annotated[str, Limits(...)]` of items of lists and maps.

    `pattern` must match the whole string: do not anchor it. Avoid `\\d` and `\\w`, which are
    Unicode in Python and ASCII in the API server. `pattern_description` describes it for users.
    `minimum` and
    `maximum` are inclusive bounds of numbers; `above` and `below` are exclusive.
    """

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    pattern: str | None = None
    pattern_description: str = ""
    min_length: int = 0
    max_length: int | None = None


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of one field, kept in the dataclass field's metadata."""

    doc: str
    limits: Limits
    unit: str
    name: str
    min_items: int
    max_items: int | None
    key: str
    unique: bool
    hashed: bool
    quantity: bool


def setting(
    doc: str,
    *,
    default: Any = REQUIRED,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    pattern: str | None = None,
    pattern_description: str = "",
    min_length: int = 0,
    max_length: int | None = None,
    unit: str = "",
    name: str = "",
    min_items: int = 0,
    max_items: int | None = None,
    key: str = "",
    unique: bool = False,
    hashed: bool = True,
    quantity: bool = False,
) -> Any:
    """Return a dataclass field of a document; without `default` it is required.

    `key` makes a list a map whose items are identified by that field; `unique` makes it a set.
    `hashed=False` omits the field from the document's hash. `quantity` marks a map of Kubernetes
    quantities (strings or integers). `name` is the name in the document if it is not the attribute
    in camelCase. `default` has the attribute's type.
    """
    limits = Limits(
        minimum=minimum,
        maximum=maximum,
        above=above,
        below=below,
        pattern=pattern,
        pattern_description=pattern_description,
        min_length=min_length,
        max_length=max_length,
    )
    declared = Setting(
        doc=doc,
        limits=limits,
        unit=unit,
        name=name,
        min_items=min_items,
        max_items=max_items,
        key=key,
        unique=unique,
        hashed=hashed,
        quantity=quantity,
    )
    metadata = {METADATA_KEY: declared}
    if isinstance(default, dict):  # dataclasses refuse a mutable default as such
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)

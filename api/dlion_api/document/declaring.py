"""Declaration of a document's fields, used by every document class."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, ParamSpec

REQUIRED: Final = object()
METADATA_KEY: Final = "dlion"

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Allowed values of a field, or in `Annotated[str, Limits(...)]` of items of lists and maps.

    `pattern` must match the whole string: do not anchor it. Avoid `\\d` and `\\w`, which are
    Unicode in Python and ASCII in the API server. `pattern_description` describes it for users.
    `minimum` and `maximum` are inclusive bounds of numbers; `above` and `below` are exclusive.
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
class Setting(Limits):
    """The declaration of one field; without `default` it is required.

    `key` makes a list a map whose items are identified by that field; `unique` makes it a set.
    `hashed=False` omits the field from the document's hash. `quantity` marks a map of Kubernetes
    quantities (strings or integers). `default` has the attribute's type.
    """

    doc: str = dataclasses.field(kw_only=False)
    default: Any = REQUIRED
    unit: str = ""
    min_items: int = 0
    max_items: int | None = None
    key: str = ""
    unique: bool = False
    hashed: bool = True
    quantity: bool = False


def _as_field(declare: Callable[P, Setting]) -> Callable[P, Any]:
    def field(*given: P.args, **named: P.kwargs) -> Any:
        """Return a dataclass field of a document with this `Setting`."""
        declared = declare(*given, **named)
        default, metadata = declared.default, {METADATA_KEY: declared}
        if default is REQUIRED:
            return dataclasses.field(metadata=metadata)
        if isinstance(default, dict):  # dataclasses refuse a mutable default as such
            return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
        return dataclasses.field(default=default, metadata=metadata)

    return field


setting: Final = _as_field(Setting)
optional: Final = functools.partial(setting, default=None)
"""A field that may be absent: its attribute is then None."""

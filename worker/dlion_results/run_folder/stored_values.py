"""Parses the JSON and YAML of result folders, whose content may be damaged or foreign.

`stored_files` reads `summary.json` and `environment.yaml` for the report, `listing` for `dlion ls`.
"""

import json
from collections.abc import Callable
from typing import Any, Final

import yaml

MAX_BYTES: Final = 64 << 20
MAX_DEPTH: Final = 64
MAX_NUMBER: Final = 1e300
"""Sums and multiples of lesser numbers are finite."""
MAX_FIGURE: Final = 1e10
"""No run lasts so many seconds (317 years), or has such an accuracy."""
_MAX_TEXT: Final = 10_000
_MAX_COUNT: Final = 1 << 31

# PyYAML's constructors raise built-in errors: `!!int x`, `!!bool x`, `!!timestamp x`, 2026-13-45.
UNREADABLE: Final = (
    OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError,
    yaml.YAMLError,
)  # fmt: skip

_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FAST):  # type: ignore[misc] # with libyaml, where PyYAML has it
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Ignore `<<`: a merge may expand without bound, and our files do not use it."""


def parse_mapping(content: bytes, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """The mapping in the content; empty for any other value. Raises: one of UNREADABLE."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    values = parse(content)
    return values if isinstance(values, dict) else {}


def parse_yaml(content: bytes) -> Any:
    """Parse YAML of limited depth.

    Raises ValueError for deeper nesting, because the recursive reader would overflow the stack and
    crash; and others of UNREADABLE.
    """
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return yaml.load(content, Loader=_Loader)  # noqa: S506 - a SafeLoader


def text_of(value: object) -> str:
    """The start of the text, with unencodable characters replaced; empty for any other type.

    Aliases in YAML may give one long text a million times, each of which would be copied.
    """
    if not isinstance(value, str):
        return ""
    return value[:_MAX_TEXT].encode("utf-8", "replace").decode()


def number_of(value: object, *, below: float = MAX_NUMBER) -> float | None:
    """The number if it is less than `below`, without its sign; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be too large for a float.
    return float(value) if abs(value) < below else None


def count_of(value: object) -> int | None:
    """The whole number of at least 0; None for anything else, and for 2**31 and more."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MAX_COUNT else None

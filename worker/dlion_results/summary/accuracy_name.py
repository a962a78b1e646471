"""What people read in place of "accuracy", where that is another figure. Pure.

Records and summaries may be of anyone: any other name counts as "accuracy".
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dlion_api.protocol.progress import R_SQUARED

ACCURACY: Final = "accuracy"


def accuracy_name(summary: Mapping[str, Any]) -> str:
    """The name in a summary; older ones have none.

    >>> accuracy_name({"accuracy": {"name": "R²"}}), accuracy_name({"accuracy": {}})
    ('R²', 'accuracy')
    """
    return common_name([summary["accuracy"].get("name")])


def common_name(names: Iterable[object]) -> str:
    """The common name of all runs or workers; "accuracy" if they differ.

    >>> common_name(["R²", "R²"]), common_name(["R²", ""]), common_name([])
    ('R²', 'accuracy', 'accuracy')
    """
    found = [name == R_SQUARED for name in names]
    return R_SQUARED if found and all(found) else ACCURACY


def as_title(name: str) -> str:
    """The name as the begin of a heading."""
    return name[:1].upper() + name[1:]

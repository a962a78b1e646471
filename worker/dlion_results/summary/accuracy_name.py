"""What people read in place of "accuracy", where that is another figure. Pure.

Records and summaries may be of anyone: any other name counts as "accuracy".
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from dlion_api.status_names import ACCURACY, R_SQUARED

_MAX_WHOLE: Final = 1e15
"""Larger numbers, which diverged runs have, are spelt with an exponent."""


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


def accuracy_text(value: float | None, name: str, digits: int = 1) -> str:
    """An accuracy in per cent with that many digits, or another figure as a number.

    >>> accuracy_text(0.8349, "accuracy"), accuracy_text(0.8349, "R²"), accuracy_text(None, "R²")
    ('83.5 %', '0.83', '—')
    >>> accuracy_text(-0.001, "R²"), accuracy_text(-1e30, "R²")
    ('0.00', '-1e+30')
    """
    if value is None or not math.isfinite(value):
        return "—"
    shown, unit = (100 * value, " %") if name == ACCURACY else (value, "")
    digits = digits if unit else 2
    if abs(shown) >= _MAX_WHOLE:
        return f"{shown:.3g}{unit}"
    return f"{round(shown, digits) + 0.0:.{digits}f}{unit}"  # + 0.0: no "-0.00"


def goal_text(value: float, name: str) -> str:
    """A target in whole per cent, or another figure with its name.

    >>> goal_text(0.8, "accuracy"), goal_text(0.8, "R²")
    ('80%', 'R² 0.80')
    """
    return f"{value:.0%}" if name == ACCURACY else f"{name} {accuracy_text(value, name)}"


def as_title(name: str) -> str:
    """The name as the begin of a heading."""
    return name[:1].upper() + name[1:]

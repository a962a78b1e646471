"""Spells figures for the report page; None becomes a dash."""

import re
from collections.abc import Callable
from typing import Any, Final

from dlion_results.summary.accuracy_name import accuracy_text

UNKNOWN: Final = "—"
_MAX_WHOLE: Final = 1e15
"""Larger numbers, which damaged files may have, are spelt with an exponent."""

_QUERY: Final = re.compile(r"(https?://[^\s?]*)\?\S*")


def percent(value: float, digits: int = 1) -> str:
    """A fraction in per cent.

    >>> percent(0.98123), percent(0.98123, 0)
    ('98.1 %', '98 %')
    """
    return f"{_fixed(value * 100, f'.{digits}f')} %"


def rough_accuracy(value: float, name: str) -> str:
    """An accuracy in whole per cent, with a digit more where that would hide the last errors, or
    what stands for an accuracy as a number.

    >>> [rough_accuracy(value, "accuracy") for value in (0.983, 0.9967, 1.0)]
    ['98 %', '99.7 %', '100 %']
    """
    return accuracy_text(value, name, 1 if 0.985 <= value < 1 else 0)


def size(count: float) -> str:
    """Bytes with a decimal prefix.

    >>> size(402), size(19_473_543)
    ('402 B', '19.5 MB')
    """
    for prefix in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float) -> str:
    """
    >>> duration(3.21), duration(60), duration(123), duration(3725)
    ('3.2 s', '60 s', '2:03 min', '1:02:05 h')
    """
    if abs(seconds) < 9.95:
        return f"{seconds:.1f} s"
    if abs(seconds) < 89.5:
        return f"{seconds:.0f} s"
    if not abs(seconds) < _MAX_WHOLE:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def figure(value: float) -> str:
    """A number with three digits.

    >>> figure(11392.2), figure(3.678), figure(7.98e-06)
    ('11,392', '3.68', '7.98e-06')
    """
    return whole(value) if abs(value) >= 100 else f"{value:.3g}"


def whole(value: float) -> str:
    """
    >>> whole(11392.2), whole(1e300)
    ('11,392', '1e+300')
    """
    return _fixed(value, ",.0f")


def _fixed(value: float, spelling: str) -> str:
    return format(value, spelling if abs(value) < _MAX_WHOLE else ".3g")


def or_unknown(spell: Callable[..., str], value: float | None, *options: Any) -> str:
    """The spelt value; a dash where there is none."""
    return UNKNOWN if value is None else spell(value, *options)


def shortened(text: str, most: int) -> str:
    """The text, shortened to at most `most` characters.

    >>> shortened("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def without_queries(text: str) -> str:
    """The text without the queries of its URLs: a presigned one has its signature there, and pages
    are shared.

    >>> without_queries("url: https://example.com/d.npz?X-Amz-Signature=a1b2")
    'url: https://example.com/d.npz?…'
    """
    return _QUERY.sub(r"\1?…", text)

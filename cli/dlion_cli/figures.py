"""How figures and foreign text are spelt in a terminal: one way for live view and tables."""

from __future__ import annotations

import math

NOT_KNOWN = "—"


def share(value: float | None) -> str:
    """A fraction in per cent.

    >>> share(0.6543)
    '65.4 %'
    """
    return NOT_KNOWN if value is None or not math.isfinite(value) else f"{value * 100:.1f} %"


def size(count: float | None) -> str:
    """Bytes with a decimal prefix.

    >>> size(1_234_567), size(950)
    ('1.23 MB', '950 B')
    """
    if count is None or not math.isfinite(count):
        return NOT_KNOWN
    for prefix in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if not prefix else f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.3g} TB"


def duration(seconds: float | None) -> str:
    """Minutes and seconds, with hours where there are any.

    >>> duration(83), duration(3725)
    ('1:23', '1:02:05')
    """
    if seconds is None or not math.isfinite(seconds):
        return NOT_KNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(value: float | None) -> str:
    """Samples per second or the like, three digits.

    >>> rate(1234.5), rate(3.14159)
    ('1,234', '3.14')
    """
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def printable(text: str) -> str:
    """Foreign text without anything that a terminal would obey.

    >>> printable("a" + chr(27) + "[2Jb")
    'a·[2Jb'
    """
    return "".join(letter if letter.isprintable() else "·" for letter in text)

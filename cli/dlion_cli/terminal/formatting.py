"""Formats figures and untrusted text for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlion_api.remaining_time import Remaining

UNKNOWN = "—"


def format_percent(value: float | None) -> str:
    """A fraction in per cent.

    >>> format_percent(0.6543)
    '65.4 %'
    """
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value * 100:.1f} %"


def format_bytes(count: float | None) -> str:
    """Bytes with a decimal prefix.

    >>> format_bytes(1_234_567), format_bytes(950)
    ('1.23 MB', '950 B')
    """
    if count is None or not math.isfinite(count):
        return UNKNOWN
    for prefix in ("", "k", "M", "G"):
        if abs(float(f"{count:.3g}")) < 1000:  # as it is shown
            return f"{count:.0f} B" if not prefix else f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{float(f'{count:.3g}'):,.15g} TB"


def format_duration(seconds: float | None) -> str:
    """Minutes and seconds, with hours if needed.

    >>> format_duration(83), format_duration(3725)
    ('1:23', '1:02:05')
    """
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_remaining(
    seconds: float | None, target_s: tuple[float, float] | None, *, has_target: bool
) -> str:
    """The time left until a known end, or until an accuracy, as a range.

    `has_target`: an accuracy may end the run before `seconds`.

    >>> format_remaining(90, None, has_target=False), format_remaining(90, None, has_target=True)
    ('1:30', '≤ 1:30')
    >>> format_remaining(90, (40, 200), has_target=True)
    '0:40 to 1:30'
    >>> format_remaining(None, None, has_target=True)
    '—'
    """
    if target_s is not None:
        low_s, high_s = target_s
        high_s = high_s if seconds is None else min(high_s, seconds)
        return f"{format_duration(min(low_s, high_s))} to {format_duration(high_s)}"
    if seconds is None:
        return UNKNOWN
    return f"{'≤ ' if has_target else ''}{format_duration(seconds)}"


def format_way(predicted: Remaining, *, is_virtual: bool = False) -> str:
    """The completed share of a run, if known, and the time left.

    >>> from dlion_api.remaining_time import Remaining
    >>> format_way(Remaining(fraction=0.42, seconds=90.0)), format_way(Remaining())
    ('42 % done, ETA 1:30', 'ETA —')
    >>> format_way(Remaining(seconds=90.0), is_virtual=True)
    'ETA 1:30 of virtual time'
    """
    done = "" if predicted.fraction is None else f"{100 * predicted.fraction:.0f} % done, "
    left = format_remaining(predicted.seconds, predicted.target_s, has_target=predicted.has_target)
    return f"{done}ETA {left}{' of virtual time' if is_virtual and left != UNKNOWN else ''}"


def format_rate(value: float | None) -> str:
    """A number with three digits.

    >>> format_rate(1234.5), format_rate(3.14159)
    ('1,234', '3.14')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def printable(text: str) -> str:
    """The text with control characters replaced.

    >>> printable("a" + chr(27) + "[2Jb")
    'a·[2Jb'
    """
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def printable_lines(text: str) -> str:
    """The text with control characters replaced in each of its lines.

    >>> printable_lines("2 problems:" + chr(10) + "  spec.a" + chr(27) + "[2J")
    '2 problems:\\n  spec.a·[2J'
    """
    return "\n".join(map(printable, text.splitlines()))

"""Test the format of figures on the terminal.

Prefixes are decimal. Durations carry into minutes and hours. A figure that is unknown or not finite
is a dash.

Left out: tables (tests/unit/results/test_table).
"""

from __future__ import annotations

import math

import pytest

from dlion_cli.terminal.formatting import (
    UNKNOWN,
    format_bytes,
    format_duration,
    format_percent,
    format_rate,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [(999.6, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (-999_999, "-1 MB"),
     (999_999_999, "1 GB"), (999.7e9, "1 TB"), (999.7e12, "1,000 TB"), (5.125e16, "51,200 TB")],
)  # fmt: skip
def test_rounded_bytes_get_the_next_prefix(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1023, "1.02 kB"), (5e6, "5 MB"), (2e12, "2 TB")],
)
def test_bytes_have_decimal_prefixes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")]
)
def test_durations_carry(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("form", [format_bytes, format_duration, format_percent, format_rate])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_an_unknown_figure_is_a_dash(form: object, value: float | None) -> None:
    assert callable(form)
    assert form(value) == UNKNOWN

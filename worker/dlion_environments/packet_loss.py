"""The rate of a TCP connection under packet loss, and the total loss of several segments."""

from __future__ import annotations

import math
from collections.abc import Iterable

SEGMENT_BYTES = 1448
"""Payload of a full TCP segment on Ethernet, with time stamps."""

MATHIS_CONSTANT = math.sqrt(3 / 4)
"""With an acknowledgement for every second segment, the usual delayed one (for every one: 3/2)."""

MIN_ROUND_TRIP_S = 0.001
"""Round trip of a link without latency. Source: ours."""


def tcp_bytes_per_s(loss_fraction: float, round_trip_s: float) -> float:
    """Maximum payload bytes per second; inf without loss.

    A window that halves at each loss and grows by a segment per round trip carries MSS / RTT x C /
    sqrt(p). CUBIC does no worse: at short round trips it follows the same law (RFC 9438, section
    4.3). Time-outs are ignored; above some per cent of loss they reduce the rate further.

    Source: Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion Avoidance
    Algorithm, ACM Computer Communication Review 27(3), 1997.
    """
    if loss_fraction <= 0:
        return math.inf
    round_trip_s = max(MIN_ROUND_TRIP_S, round_trip_s)
    return SEGMENT_BYTES / round_trip_s * MATHIS_CONSTANT / math.sqrt(loss_fraction)


def combined_fraction(percents: Iterable[float]) -> float:
    """Total loss of a path whose segments lose packets independently.

    >>> round(combined_fraction([10.0, 50.0]), 6)
    0.55
    """
    return 1.0 - math.prod(1.0 - percent / 100 for percent in percents)

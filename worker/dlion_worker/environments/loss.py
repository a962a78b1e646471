"""What packet loss leaves of a TCP connection's rate.

Owns that formula and the loss of links that are made of several parts. Pure.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SEGMENT_BYTES = 1448
"""Payload of a full TCP segment on Ethernet, with time stamps."""

CONSTANT = math.sqrt(3 / 4)
"""For an acknowledgement of every second segment, as receivers delay them (every one: 3/2)."""

LEAST_ROUND_TRIP_S = 0.001
"""Of a link without latency: two machines' own. Source: ours."""


def tcp_bytes_per_s(loss_fraction: float, round_trip_s: float) -> float:
    """Payload bytes per second at the most; inf where nothing is lost.

    A window that halves at each loss and grows by a segment per round trip carries
    MSS / RTT x C / sqrt(p). CUBIC does no worse: at short round trips it follows the same law (RFC
    9438, section 4.3). Time-outs are left out, so that above some percent of loss less would come.

    Source: Mathis, Semke, Mahdavi and Ott, The Macroscopic Behavior of the TCP Congestion Avoidance
    Algorithm, ACM Computer Communication Review 27(3), 1997.
    """
    if loss_fraction <= 0:
        return math.inf
    round_trip_s = max(LEAST_ROUND_TRIP_S, round_trip_s)
    return SEGMENT_BYTES / round_trip_s * CONSTANT / math.sqrt(loss_fraction)


def combined_fraction(percents: Iterable[float]) -> float:
    """The loss of a way whose parts lose packets independently of each other.

    >>> round(combined_fraction([10.0, 50.0]), 6)
    0.55
    """
    return 1.0 - math.prod(1.0 - percent / 100 for percent in percents)

"""Rates of a measured transfer, for limits on the rate in any second and from its start."""

from __future__ import annotations

from dlion_local.emulation.measurement import TransferMeasurement


def windows_bytes_per_s(
    one: TransferMeasurement, window_s: float, step_s: float = 0.05
) -> list[float]:
    """Rates over sliding windows of that length, one every `step_s`."""
    rates: list[float] = []
    if not one.arrivals:
        return rates
    start_s = one.arrivals[0][0]
    while start_s + window_s <= one.arrivals[-1][0]:
        inside = [n for t, n in one.arrivals if start_s <= t <= start_s + window_s]
        rates.append((inside[-1] - inside[0]) / window_s)
        start_s += step_s
    return rates


def max_mean_bytes_per_s(one: TransferMeasurement, began_s: float, after_s: float = 1.0) -> float:
    """The maximum mean rate from `began_s`, before the transfer, to any arrival `after_s` later.

    A reader without a core for a moment finds more bytes in the next window. Here it finds fewer.
    """
    return max((n / (t - began_s) for t, n in one.arrivals if t >= began_s + after_s), default=0.0)

"""Rates of a measured transfer over sliding windows, for limits on the rate in any second."""

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

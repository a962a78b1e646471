"""A CPU under a hard CFS quota in virtual time, for tests of quota measurements."""

from __future__ import annotations

PERIOD_S = 0.1


class QuotaCpu:
    """One thread under a CFS quota: it runs until the period's share is used, then pauses."""

    def __init__(self, quota_cores: float) -> None:
        self.quota_cores = quota_cores
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.throttled_s = 0.0
        self._period, self._used_s = 0, 0.0

    def burn(self, cpu_s: float) -> None:
        while cpu_s > 1e-12:
            if int(self.now_s / PERIOD_S + 1e-9) > self._period:
                self._period, self._used_s = int(self.now_s / PERIOD_S + 1e-9), 0.0
            end_s = (self._period + 1) * PERIOD_S
            step_s = min(
                cpu_s, max(0.0, self.quota_cores * PERIOD_S - self._used_s), end_s - self.now_s
            )
            self.now_s += step_s
            self.cpu_s += step_s
            self._used_s += step_s
            cpu_s -= step_s
            if cpu_s > 1e-12 and self._used_s >= self.quota_cores * PERIOD_S - 1e-12:
                self.throttled_s += end_s - self.now_s
                self.now_s = end_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

"""The choice of one family's learning rate in one environment.

Created and driven by `comparison_runner`, which runs the simulations. Does no I/O.
"""

from collections.abc import Iterable
from typing import Final

from dlion_results.comparison import VariantRow, is_better

MAX_FURTHER_RATES: Final = 4
"""Rates that are tried beyond the given ones, before the best may lie at an end."""

MAX_RATE: Final = 100
"""The maximum learning rate of a manifest."""


class RateSearch:
    """Tries the given rates, and further ones as long as the best lies at an end of those tried.

    A further rate continues the sequence: next to 0.02, 0.05, 0.1 it is 0.2 or 0.008. A single
    given rate is not tried, but used as it is.
    """

    def __init__(self, rates: Iterable[float]) -> None:
        self._rows: dict[float, VariantRow | None] = dict.fromkeys(sorted(rates))
        self._further_count = 0

    def untried(self) -> list[float]:
        """The rates to try next; empty once the rate is chosen."""
        if len(self._rows) == 1:
            return []
        return [rate for rate, row in self._rows.items() if row is None]

    def record(self, row: VariantRow) -> None:
        """Take the figures of a rate that `untried` returned."""
        self._rows[row.learning_rate] = row
        if self.untried() or self._further_count == MAX_FURTHER_RATES:
            return
        rates = list(self._rows)
        if self.best in (rates[0], rates[-1]):
            is_lowest = self.best == rates[0]
            next_to = rates[1] if is_lowest else rates[-2]
            further = float(f"{self.best * self.best / next_to:.2g}")
            continues = further < self.best if is_lowest else further > self.best  # once rounded
            if continues and 0 < further <= MAX_RATE:
                self._further_count += 1
                self._rows = dict(sorted({**self._rows, further: None}.items()))

    @property
    def best(self) -> float:
        """The best rate of those tried; the only one if there is no choice."""
        rows = [row for row in self._rows.values() if row is not None]
        if not rows:
            return next(iter(self._rows))
        best = rows[0]
        for row in rows[1:]:
            if is_better(row, best):
                best = row
        return best.learning_rate

    @property
    def is_bracketed(self) -> bool:
        """Whether a lower and a higher rate than the best were tried, or there was no choice."""
        rates = list(self._rows)
        return len(rates) == 1 or self.best not in (rates[0], rates[-1])

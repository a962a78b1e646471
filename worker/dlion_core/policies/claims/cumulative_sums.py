"""Sums over rounds that find a deviation which lasts, however small it is in one round. Pure.

Called by `deviations` with one figure for each worker and round.
"""

from dlion_api.names import Rank


class CumulativeSums:
    """For each worker the excess of its figures over the allowance, less the rounds below it.

        s = max(0, s + x - allowance)

    Figures that are below the allowance on average leave the sum near zero. Others let it grow, the
    sooner the larger they are.

    Source: Page, *Continuous inspection schemes*, Biometrika 1954 (the one-sided CUSUM test).
    """

    def __init__(self, allowance: float) -> None:
        self._allowance = allowance
        self._sums: dict[Rank, float] = {}

    def add(self, rank: Rank, figure: float) -> None:
        self._sums[rank] = max(0.0, self.of(rank) + figure - self._allowance)

    def of(self, rank: Rank) -> float:
        """Return the sum of that worker; zero if it has none."""
        return self._sums.get(rank, 0.0)

    def forget(self, rank: Rank) -> None:
        self._sums.pop(rank, None)

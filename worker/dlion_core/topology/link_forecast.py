"""Predicted rates of all links, for `exchange.grouping: learned`; runs at the one decider.

Remembers how the reported rates of each link changed, computes the features of `forecast_model`,
and returns the rates that groups are then made of as under `grouping: links`. Called by `grouping`
at each check. Pure: time is an argument. A decider that takes over begins without memory.

Only links that may be fast are predicted: those near or above the level that separates fast from
slow, and those whose ends have fast links to the same workers. All others stay as measured, so the
cost grows with the number of fast links. If the rates are of one class, nothing is predicted.

Source: this project.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from dlion_api.names import Rank
from dlion_core.topology.clusters import KEPT_SEPARATION, PairRates, fast_level, pairs_of
from dlion_core.topology.forecast_model import ForecastModel

DirectedRates = Mapping[tuple[Rank, Rank], float]
"""Bytes per second by sender and receiver, as the sender's sidecar last measured them."""

FRESH_S: Final = 30.0
"""A direction counts unless the other one was measured so much later."""
CANDIDATE_LOG: Final = -1.0
"""Links down to this log ratio to the level of fast ones are predicted."""
CANDIDATE_COMMON: Final = 0.34
"""A link is also a candidate if its ends share this part of their fast links."""
MAX_AGE_S: Final = 40.0
"""Ages count up to this: training has few older measurements, as its fleets are small."""
MAX_LOG: Final = 3.0
TREND_S: Final = 10.0
"""Trends are changes of log rate in this time."""


@dataclass(slots=True)
class _Link:
    """One link's past, in logarithms of bytes per second."""

    log: float
    since_s: float
    """When the rate last changed: a measurement."""
    trend: float = 0.0
    roughness: float = 0.0
    is_fast: bool = False
    class_since_s: float = 0.0

    def take(self, log: float, now_s: float) -> None:
        if log == self.log:
            return
        step, passed_s = log - self.log, max(1.0, now_s - self.since_s)
        self.trend += 0.5 * (step / passed_s * TREND_S - self.trend)
        self.roughness += 0.3 * (abs(step) - self.roughness)
        self.log, self.since_s = log, now_s


class LinkForecast:
    """Predicts the rates of links from the rates that one decider has heard."""

    def __init__(self, model: ForecastModel) -> None:
        self._model, self._history = model, LinkHistory()

    def rates(
        self, present: Collection[Rank], reported: DirectedRates, now_s: float
    ) -> dict[tuple[Rank, Rank], float]:
        """Return the predicted rates of the known pairs of those workers, the lower rank first.
        Rates that are not finite and above 0 are ignored."""
        measured = self._history.observe(present, reported, now_s)
        features, level = self._history.features(measured, now_s)
        predicted = dict(measured)
        for pair, change in self._model.predict(features).items():
            log = math.log(measured[pair] / level) + change
            predicted[pair] = level * math.exp(_clipped(log, MAX_LOG))
        return predicted


class LinkHistory:
    """Memory of the links' rates, and the features of each link."""

    def __init__(self) -> None:
        self._directed: dict[tuple[Rank, Rank], tuple[float, float]] = {}
        """Rate, and when it last changed."""
        self._links: dict[tuple[Rank, Rank], _Link] = {}

    def observe(
        self, present: Collection[Rank], reported: DirectedRates, now_s: float
    ) -> dict[tuple[Rank, Rank], float]:
        """Take the reports of a check; return the measured rate of each known pair."""
        for direction, reported_rate in reported.items():
            if math.isfinite(reported_rate) and reported_rate > 0:
                before = self._directed.get(direction)
                if before is None or before[0] != reported_rate:
                    self._directed[direction] = reported_rate, now_s
        measured = {}
        for pair in pairs_of(present):
            rate = self._slower(*pair)
            if rate is None:
                continue
            measured[pair] = rate
            link = self._links.get(pair)
            if link is None:
                self._links[pair] = _Link(math.log(rate), now_s, class_since_s=now_s)
            else:
                link.take(math.log(rate), now_s)
        return measured

    def _slower(self, one: Rank, other: Rank) -> float | None:
        """The slower of the directions that were measured lately; else of the last one."""
        there, back = self._directed.get((one, other)), self._directed.get((other, one))
        if there is None or back is None:
            found = there or back
            return None if found is None else found[0]
        if abs(there[1] - back[1]) > FRESH_S:
            return max(there, back, key=lambda each: each[1])[0]
        return min(there[0], back[0])

    def features(
        self, measured: PairRates, now_s: float
    ) -> tuple[dict[tuple[Rank, Rank], list[float]], float]:
        """Return the features of the links to predict, in the order of `FEATURES`, and the level
        between fast and slow; none if rates are of one class."""
        if len(measured) < 2 or not fast_level(measured.values(), KEPT_SEPARATION):
            return {}, 1.0
        level = fast_level(measured.values(), 1.0)
        logs = {pair: math.log(rate / level) for pair, rate in measured.items()}
        fast: dict[Rank, set[Rank]] = {}
        for pair, log in logs.items():
            link = self._links[pair]
            if (log > 0) != link.is_fast:
                link.is_fast, link.class_since_s = log > 0, now_s
            if log > 0:
                fast.setdefault(pair[0], set()).add(pair[1])
                fast.setdefault(pair[1], set()).add(pair[0])
        common = Counter(pair for peers in fast.values() for pair in combinations(sorted(peers), 2))
        found = {}
        for pair, log in logs.items():
            most = min(len(fast.get(pair[0], ())), len(fast.get(pair[1], ())))
            share = common[pair] / max(1, most)
            if log > CANDIDATE_LOG or share > CANDIDATE_COMMON:
                through = self._through(pair, fast, logs) if common[pair] else 0.0
                found[pair] = self._of_link(self._links[pair], log, through, share, now_s)
        return found, level

    @staticmethod
    def _through(pair: tuple[Rank, Rank], fast: Mapping[Rank, set[Rank]], logs: PairRates) -> float:
        """The mean, over workers with fast links to both ends, of the slower of the two links."""
        ends = [
            [logs[min(end, peer), max(end, peer)] for end in pair]
            for peer in sorted(fast[pair[0]] & fast[pair[1]])
        ]
        return math.fsum(map(min, ends)) / len(ends)

    @staticmethod
    def _of_link(
        link: _Link, log: float, through: float, share: float, now_s: float
    ) -> list[float]:
        return [
            _clipped(log, MAX_LOG) / 2,
            _clipped(link.trend, 2.0),
            min(MAX_AGE_S, now_s - link.since_s) / 60,
            math.log1p((now_s - link.class_since_s) / 10) / 3,
            min(2.0, link.roughness),
            _clipped(through, MAX_LOG) / 2,
            share,
        ]


def _clipped(value: float, most: float) -> float:
    return min(most, max(-most, value))

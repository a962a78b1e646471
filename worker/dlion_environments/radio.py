"""Workers that move: from tracks and a radio to the rates of links, for virtual time.

A pair within reach of each other has a link of its own, whose rate falls with their distance and
fades. Traffic to all peers beyond reach shares one uplink and one downlink of the worker, as over a
mobile network. Used by `planning`, and by benchmarks/clustering.py.

Source: path loss with exponent 3 and log-normal shadowing (Rappaport, Wireless Communications,
2002, section 4.9); shadowing correlated in time as in Gudmundson, Correlation model for shadow
fading in mobile radio systems, 1991; Shannon's capacity, up to the radio's best rate. The constants
are ours.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from dlion_api.errors import Problem
from dlion_api.names import Rank
from dlion_environments.plan import BYTES_PER_MBIT, Conditions, Pipe

PATH_LOSS_EXPONENT: Final = 3.0
EDGE_SNR: Final = 2.0
"""Signal over noise at the end of the reach: less is not decoded."""
BEST_SNR: Final = 1000.0
"""Signal over noise for the radio's best rate (30 dB)."""
SHADOW_MEMORY: Final = 0.8
"""Correlation of the shadowing of one link from one interval to the next."""

MAX_RATES: Final = 5_000_000
"""Rates of all pairs at all intervals. A plan holds each in some hundred bytes."""

Place = tuple[float, float]


@dataclass(frozen=True)
class Track:
    """One worker's track: points in time and space, with straight lines between them."""

    times_s: tuple[float, ...]
    places: tuple[Place, ...]

    def at(self, time_s: float) -> Place:
        """The place at a time; before the first and after the last point it stands still.

        >>> Track((0.0, 10.0), ((0.0, 0.0), (30.0, 0.0))).at(5.0)
        (15.0, 0.0)
        """
        after = bisect_right(self.times_s, time_s)
        if after == 0 or after == len(self.times_s):
            return self.places[min(after, len(self.places) - 1)]
        (begin_s, end_s), (one, other) = (
            self.times_s[after - 1 : after + 1],
            self.places[after - 1 : after + 1],
        )
        part = (time_s - begin_s) / (end_s - begin_s)
        return one[0] + part * (other[0] - one[0]), one[1] + part * (other[1] - one[1])


@dataclass(frozen=True)
class Radio:
    """Properties of all workers' radios."""

    range_metres: float
    bytes_per_s: float
    """Rate of a near pair."""
    beyond_bytes_per_s: float
    """Rate of a worker with all peers beyond reach together, each way."""
    fading_decibels: float
    every_s: float
    seed: int


def reached_bytes_per_s(radio: Radio, metres: float, fading_decibels: float) -> float:
    """Rate of a link within reach; 0 beyond.

    >>> radio = Radio(300.0, 5e6, 2.5e5, 0.0, 5.0, 1)
    >>> [round(reached_bytes_per_s(radio, metres, 0.0)) for metres in (10, 150, 299, 301)]
    [5000000, 2050452, 799928, 0]
    """
    ratio = radio.range_metres / max(metres, 1.0)
    snr = EDGE_SNR * ratio**PATH_LOSS_EXPONENT * 10 ** (fading_decibels / 10)
    if snr < EDGE_SNR:
        return 0.0
    return radio.bytes_per_s * min(1.0, math.log2(1 + snr) / math.log2(1 + BEST_SNR))


class Fading:
    """Shadowing of each link over time, the same for the same seed."""

    def __init__(self, radio: Radio, count: int) -> None:
        self._rng = random.Random(radio.seed)  # noqa: S311 - no secret
        self._deviation = radio.fading_decibels
        self._decibels = {pair: self._drawn() for pair in combinations(range(count), 2)}

    def _drawn(self) -> float:
        return self._rng.gauss(0.0, self._deviation) if self._deviation else 0.0

    def decibels(self) -> Mapping[tuple[int, int], float]:
        """Fading of each pair, the lower rank first."""
        return self._decibels

    def advance(self) -> None:
        """Go to the next interval."""
        new = math.sqrt(1 - SHADOW_MEMORY**2)
        for pair, before in self._decibels.items():
            self._decibels[pair] = SHADOW_MEMORY * before + new * self._drawn()


def rates_over_time(
    radio: Radio, tracks: Sequence[Track], until_s: float
) -> Iterator[tuple[float, dict[tuple[int, int], float]]]:
    """At each interval's begin, the rates of all pairs within reach, the lower rank first.

    Ends at `until_s`, or when the last track has ended: nothing changes then.
    """
    fading = Fading(radio, len(tracks))
    until_s = min(until_s, max((track.times_s[-1] for track in tracks), default=0.0))
    step = 0
    while (now_s := step * radio.every_s) <= until_s:
        places = [track.at(now_s) for track in tracks]
        rates = {}
        for pair, decibels in fading.decibels().items():
            metres = math.dist(places[pair[0]], places[pair[1]])
            if rate := reached_bytes_per_s(radio, metres, decibels):
                rates[pair] = rate
        yield now_s, rates
        fading.advance()
        step += 1


def with_radio(
    conditions: Conditions, radio: Radio, rates: Mapping[tuple[int, int], float]
) -> Conditions:
    """Conditions with the links of the radio beside the pipes that are there."""
    everyone = range(len(conditions.workers))
    only = [frozenset({Rank(rank)}) for rank in everyone]
    near: list[dict[int, float]] = [{} for _ in everyone]
    for (one, other), rate in rates.items():
        near[one][other] = near[other][one] = rate
    workers = []
    for worker in conditions.workers:
        reached = near[worker.rank]
        beyond = frozenset(
            Rank(peer) for peer in everyone if peer != worker.rank and peer not in reached
        )
        shared = (Pipe(beyond, radio.beyond_bytes_per_s),) if beyond else ()
        own = tuple(Pipe(only[peer], rate) for peer, rate in sorted(reached.items()))
        uplink, downlink = (*worker.uplink, *shared, *own), (*worker.downlink, *shared)
        workers.append(replace(worker, uplink=uplink, downlink=downlink))
    return Conditions(tuple(workers))


def size_problems(count: int, ends_s: float, every_s: float) -> Iterator[Problem]:
    """The error for too many rates of this many workers until then."""
    pairs = math.comb(count, 2)
    if pairs * ends_s / every_s > MAX_RATES:
        yield Problem(
            "radio.everySeconds",
            f"{pairs:,} pairs of workers would have more than {MAX_RATES:,} rates",
            value=f"{every_s:g} until {ends_s:g} s",
            allowed=f"at least {pairs * ends_s / MAX_RATES:.2g} until then",
            advice="Let rates change less often, end the tracks, or lower trainer.stop.maxSeconds.",
        )


def radio_of(
    range_metres: float,
    mbit_per_s: float,
    beyond_mbit_per_s: float,
    fading_decibels: float,
    every_s: float,
    seed: int,
) -> Radio:
    """The radio of an environment file's values."""
    return Radio(
        range_metres,
        mbit_per_s * BYTES_PER_MBIT,
        beyond_mbit_per_s * BYTES_PER_MBIT,
        fading_decibels,
        every_s,
        seed,
    )

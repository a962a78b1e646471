"""Fleets of workers that move, for `clustering.py`, generated from a seed.

Fleets for training and for choosing parameters have 16 to 40 workers and their own seeds. Measured
fleets have 50 and 200 workers, which no training fleet has.

- `convoys`: groups on a square move to random places (random waypoint); members keep near their
  group's centre (reference point group mobility: Hong, Gerla, Pei and Chiang, 1999). When two
  groups meet, each member changes its group with a probability of 15 %.
- `highway`: groups on a road in both directions; members change between groups of one direction.
- `static`: groups that do not move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_environments.radio import Radio, Track, radio_of, rates_over_time

Array = NDArray[np.float64]

EVERY_S = 10
"""Seconds between points of a track."""
SPREAD_M = 40.0
MEETING_M = 150.0
CHANGE_CHANCE = 0.15
MEMBER_SPEED = 25.0
RADIO: dict[str, float] = {
    "rangeMetres": 300, "mbitPerS": 40, "beyondMbitPerS": 1, "fadingDecibels": 3,
    "everySeconds": 5,
}  # fmt: skip

Rates = dict[tuple[int, int], float]


@dataclass(frozen=True)
class Fleet:
    """The positions of each worker over time, and its group."""

    kind: str
    seed: int
    positions_TNC: Array
    """Metres, every `EVERY_S`."""
    home_TN: NDArray[np.int64]
    """The group that each worker stays near."""

    @property
    def count(self) -> int:
        """Return the number of its workers."""
        return self.positions_TNC.shape[1]

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.count}"

    @property
    def seconds(self) -> int:
        """Return the duration of its movement."""
        return (len(self.positions_TNC) - 1) * EVERY_S

    @property
    def radio(self) -> Radio:
        values = RADIO
        return radio_of(
            values["rangeMetres"], values["mbitPerS"], values["beyondMbitPerS"],
            values["fadingDecibels"], values["everySeconds"], self.seed,
        )  # fmt: skip

    @cached_property
    def tracks(self) -> list[Track]:
        times = tuple(float(step * EVERY_S) for step in range(len(self.positions_TNC)))
        if self.kind == "static":
            times = times[:1]
        return [
            Track(
                times, tuple((float(x), float(y)) for x, y in self.positions_TNC[: len(times), n])
            )
            for n in range(self.count)
        ]

    @cached_property
    def rates(self) -> list[Rates]:
        """Return the rates of the links within reach in each interval of the radio."""
        every = [rates for _, rates in rates_over_time(self.radio, self.tracks, math.inf)]
        steps = int(self.seconds / RADIO["everySeconds"]) + 1
        return every + [every[-1]] * (steps - len(every))

    def environment(self, cores: float) -> dict[str, Any]:
        """Return the document for `dlion simulate -e`."""
        workers = [
            {
                "cores": cores,
                "track": [
                    {"seconds": at, "x": round(x, 1), "y": round(y, 1)}
                    for at, (x, y) in zip(track.times_s, track.places, strict=True)
                ],
            }
            for track in self.tracks
        ]
        return {"name": self.name, "workers": workers, "radio": {**RADIO, "seed": self.seed}}

    @property
    def sites(self) -> list[int]:
        """Return the number of workers of each group at the start, in order of rank."""
        return np.bincount(self.home_TN[0]).tolist()


def make_fleet(kind: str, count: int, seed: int, seconds: int) -> Fleet:
    """Return a fleet of that kind; equal arguments give equal fleets."""
    rng = np.random.default_rng([seed, count, len(kind)])
    groups = max(2, round(math.sqrt(count / 2)))
    home_N = np.sort(np.arange(count) % groups)
    side = 700.0 * math.sqrt(groups)
    road = 500.0 * groups
    is_road = kind == "highway"
    extent = np.array([road, 0.0]) if is_road else np.array([side, side])
    centre_GC = rng.uniform(0, 1, (groups, 2)) * extent
    if kind == "static":  # apart like sites
        grid = math.ceil(math.sqrt(groups))
        centre_GC = np.array([[g % grid, g // grid] for g in range(groups)]) * 600.0
    goal_GC = rng.uniform(0, 1, (groups, 2)) * extent
    speed_G = rng.uniform(8, 22, groups) if is_road else rng.uniform(5, 15, groups)
    way_G = np.where(np.arange(groups) % 2, -1.0, 1.0)
    offset_NC = rng.normal(0, SPREAD_M, (count, 2))
    place_NC = centre_GC[home_N] + offset_NC
    met = np.zeros((groups, groups), bool)
    positions, homes = [], []
    for second in range(seconds + 1):
        if second % EVERY_S == 0:
            positions.append(place_NC.copy())
            homes.append(home_N.copy())
        if kind == "static":
            continue
        if is_road:
            centre_GC[:, 0] += way_G * speed_G
            way_G = np.where(
                centre_GC[:, 0] < 0, 1.0, np.where(centre_GC[:, 0] > road, -1.0, way_G)
            )
            centre_GC[:, 1] = 10.0 * way_G
        else:
            gap_GC = goal_GC - centre_GC
            gap_G = np.linalg.norm(gap_GC, axis=1)
            arrived = gap_G < speed_G
            goal_GC[arrived] = rng.uniform(0, side, (int(arrived.sum()), 2))
            centre_GC += gap_GC / np.maximum(gap_G, 1e-9)[:, None] * speed_G[:, None]
        home_N = _changed_over(rng, home_N, centre_GC, met, way_G if is_road else None)
        offset_NC += -0.02 * offset_NC + rng.normal(0, SPREAD_M * 0.2, (count, 2)) * 0.5
        gap_NC = centre_GC[home_N] + offset_NC - place_NC
        gap_N = np.linalg.norm(gap_NC, axis=1)
        place_NC += gap_NC * np.minimum(1.0, MEMBER_SPEED / np.maximum(gap_N, 1e-9))[:, None]
    return Fleet(kind, seed, np.array(positions), np.array(homes))


def _changed_over(
    rng: np.random.Generator,
    home_N: NDArray[np.int64],
    centre_GC: Array,
    met: NDArray[np.bool_],
    way_G: Array | None,
) -> NDArray[np.int64]:
    """Return homes after an exchange between groups that meet; `met` stores which ones are near."""
    home_N = home_N.copy()
    groups = len(centre_GC)
    for one in range(groups):
        for other in range(one + 1, groups):
            near = bool(np.linalg.norm(centre_GC[one] - centre_GC[other]) < MEETING_M)
            begins = near and not met[one, other]
            met[one, other] = near
            if not begins or (way_G is not None and way_G[one] != way_G[other]):
                continue
            change = rng.random(len(home_N)) < CHANGE_CHANCE * (1 if way_G is None else 2)
            was = home_N.copy()
            home_N[(was == one) & change] = other
            home_N[(was == other) & change] = one
    return home_N

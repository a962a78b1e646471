"""Virtual time of exchanges for a grouping method, without training, for `clustering.py`.

Probes, reports, hysteresis and gateways are the product's (`dlion_core.topology`); only the method
differs. In a round each worker computes for a while and then sends its weights to each neighbour.
The round ends when all have arrived. Links within reach are separate; other traffic shares the
worker's uplink and its downlink.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from clustering_fleets import EVERY_S, RADIO, Fleet, Rates
from sklearn.cluster import KMeans, SpectralClustering
from sklearn.metrics import adjusted_rand_score

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Grouping
from dlion_core.topology.clusters import (
    Groups,
    PairRates,
    find_groups,
    graph_of_groups,
    sorted_groups,
)
from dlion_core.topology.forecast_model import ForecastModel
from dlion_core.topology.grouping import PairBandwidths
from dlion_core.topology.link_forecast import DirectedRates, LinkForecast
from dlion_core.topology.regrouping import CHECK_INTERVAL_S, PATIENCE, Regrouping

COMPUTE_S = 0.5
WEIGHTS_BYTES = 40_000
FIRST_PROBES_S = 10.0
Find = Callable[[PairRates, float], Groups]


@dataclass(frozen=True)
class Way:
    """A method to group workers."""

    find: Callable[[int, int], Find]
    """Takes the true number of groups and a seed; returns the function from rates to groups."""
    fresh: bool = True
    """Use the last probes as rates, as for learned groups, not the second lowest of five."""
    model: ForecastModel | None = None
    patience: int = PATIENCE


def by_links(_count: int, _seed: int) -> Find:
    return find_groups


def by_random(count: int, seed: int) -> Find:
    """Draw the true number of groups once."""

    def find(rates: PairRates, _separation: float) -> Groups:
        ranks = sorted({rank for pair in rates for rank in pair})
        of = np.random.default_rng(seed).permutation(len(ranks)) % count
        return _grouped(ranks, of.tolist())

    return find


def by_k_means(count: int, seed: int) -> Find:
    """Cluster each worker's row of log rates, with ten starts and the true number of groups."""

    def find(rates: PairRates, _separation: float) -> Groups:
        ranks, log_NN = _matrix(rates)
        of = KMeans(min(count, len(ranks)), n_init=10, random_state=seed).fit_predict(log_NN)
        return _grouped(ranks, of.tolist())

    return find


def by_spectrum(count: int, seed: int) -> Find:
    """Cluster log rates above the slowest spectrally, with the true number of groups."""

    def find(rates: PairRates, _separation: float) -> Groups:
        ranks, log_NN = _matrix(rates)
        affinity_NN = log_NN - log_NN.min() + 1e-3
        clusters = SpectralClustering(
            min(count, len(ranks)), affinity="precomputed", random_state=seed
        )
        return _grouped(ranks, clusters.fit_predict(affinity_NN).tolist())

    return find


def _matrix(rates: PairRates) -> tuple[list[Rank], np.ndarray]:
    ranks = sorted({rank for pair in rates for rank in pair})
    at = {rank: index for index, rank in enumerate(ranks)}
    log_NN = np.full((len(ranks), len(ranks)), math.log(max(rates.values())))
    for (one, other), rate in rates.items():
        log_NN[at[one], at[other]] = log_NN[at[other], at[one]] = math.log(rate)
    return ranks, log_NN


def _grouped(ranks: list[Rank], of: list[int]) -> Groups:
    return sorted_groups(
        [rank for rank, label in zip(ranks, of, strict=True) if label == wanted]
        for wanted in sorted(set(of))
    )


def reports_of(fleet: Fleet, *, fresh: bool) -> list[dict[tuple[Rank, Rank], float]]:
    """Return the input of the decider at each check: changed rates by sender and receiver.

    All sidecars probe as those of the product; the grouping does not matter.
    """
    everyone, beyond = range(fleet.count), fleet.radio.beyond_bytes_per_s
    probing = [PairBandwidths(Rank(rank), is_learned=fresh) for rank in everyone]
    peers_of = [[Rank(peer) for peer in everyone if peer != rank] for rank in everyone]
    known: dict[tuple[Rank, Rank], float] = {}
    found = []
    for second in range(fleet.seconds):
        rates = fleet.rates[int(second / RADIO["everySeconds"])]
        for rank, own in enumerate(probing):
            # At first all unknown links, later one: a call takes time and finds no second.
            for _ in peers_of[rank] if second < FIRST_PROBES_S else peers_of[rank][:1]:
                peer = own.next_to_probe(peers_of[rank], float(second))
                if peer is None:
                    break
                own.probed(peer, rates.get((min(rank, peer), max(rank, peer)), beyond))
        if second % CHECK_INTERVAL_S == 0:
            probed = {
                (Rank(rank), peer): rate
                for rank, own in enumerate(probing)
                for peer, rate in own.own().items()
            }
            found.append({link: rate for link, rate in probed.items() if known.get(link) != rate})
            known = probed
    return found


@dataclass
class Exchanged:
    """The result of a fleet with one method."""

    rounds_at_s: list[float]
    changes: int
    rand_index: float
    """Mean agreement with the groups that workers stay near (adjusted Rand)."""

    def seconds_to(self, rounds: int) -> float:
        """Return when this many rounds were done; inf: never."""
        return self.rounds_at_s[rounds - 1] if len(self.rounds_at_s) >= rounds else math.inf


def exchange(
    fleet: Fleet, way: Way, reports: list[dict[tuple[Rank, Rank], float]], *, seed: int = 1
) -> Exchanged:
    """Exchange until the fleet's tracks end, with these `reports_of` the fleet."""
    everyone = [Rank(rank) for rank in range(fleet.count)]
    find = way.find(len(fleet.sites), seed)
    regrouping = Regrouping(Rank(0), find=find, patience=way.patience)
    forecast = LinkForecast(way.model) if way.model else None
    groups = _grouped(everyone, fleet.home_TN[0].tolist())
    held = Grouping(0, Rank(0), groups, tuple(group[0] for group in groups))
    known: dict[tuple[Rank, Rank], float] = {}
    rounds: list[float] = []
    done_s, changes, agreements = 0.0, 0, []
    for check, news in enumerate(reports):
        now_s = check * CHECK_INTERVAL_S
        known.update(news)
        if forecast is not None:
            measured = forecast.rates(everyone, known, now_s)
        else:
            measured = _slower(known)
        if found := regrouping.check(everyone, measured, held, now_s):
            held, changes = found, changes + 1
        agreements.append(_agreement(held, fleet, now_s))
        while done_s < now_s + CHECK_INTERVAL_S:
            rates = fleet.rates[int(done_s / RADIO["everySeconds"])]
            done_s += round_s(held, rates, fleet.radio.beyond_bytes_per_s)
            rounds.append(done_s)
    return Exchanged(rounds, changes, float(np.mean(agreements)))


def _slower(known: DirectedRates) -> dict[tuple[Rank, Rank], float]:
    """Return the slower direction of each pair."""
    return {
        (one, other): min(rate, known.get((other, one), rate))
        for (one, other), rate in known.items()
        if one < other
    }


def round_s(held: Grouping, rates: Rates, beyond_bytes_per_s: float) -> float:
    """Return the seconds of one round at these rates."""
    slowest_s = 0.0
    for rank, peers in graph_of_groups(held).items():
        beyond = 0
        for peer in peers:
            rate = rates.get((min(rank, peer), max(rank, peer)))
            if rate is None:
                beyond += 1
            else:
                slowest_s = max(slowest_s, WEIGHTS_BYTES / rate)
        slowest_s = max(slowest_s, beyond * WEIGHTS_BYTES / beyond_bytes_per_s)
    return COMPUTE_S + slowest_s


def _agreement(held: Grouping, fleet: Fleet, now_s: float) -> float:
    label = {rank: at for at, group in enumerate(held.groups) for rank in group}
    home_N = fleet.home_TN[min(len(fleet.home_TN) - 1, int(now_s / EVERY_S))]
    return float(adjusted_rand_score(home_N, [label[Rank(n)] for n in range(fleet.count)]))

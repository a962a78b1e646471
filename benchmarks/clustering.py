"""Measure moving groups of workers: time of exchanges and training, and the groups found.

    python benchmarks/clustering.py                  exchanges in virtual time, fleets of 50
    python benchmarks/clustering.py --workers 200    fleets of 200
    python benchmarks/clustering.py --planted        groups planted in noisy rates
    python benchmarks/clustering.py --jobs           whole jobs of 50, by `dlion simulate`
    python benchmarks/clustering.py --cost           CPU of a check, by number of workers
    python benchmarks/clustering.py --plot FILE.svg  one fleet, drawn
    python benchmarks/clustering.py --train          train a new network, and write its file

Fleets are generated (`clustering_fleets`); no measured fleet was used for training, and training
has none of their sizes. Seeds 1 to 9 are for choosing parameters (`--seeds`), 900 and above are
held out. Methods: `links` (the default), `links, fresh` (the same rule on the probes of learned
groups) and `learned`. Further methods on the fresh probes: `spectral`, `k-means` (ten starts; both
get the true number of groups) and `random`. All have the same hysteresis.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from clustering_exchange import (
    Exchanged,
    Way,
    by_k_means,
    by_links,
    by_random,
    by_spectrum,
    exchange,
    reports_of,
)
from clustering_fleets import make_fleet
from clustering_jobs import print_jobs
from clustering_training import MODEL_FILE, train
from local_runs import commit
from sklearn.metrics import adjusted_rand_score

from dlion_api.names import Rank
from dlion_core.topology.clusters import SEPARATION, find_groups
from dlion_core.topology.forecast_model import shipped_model
from dlion_core.topology.link_forecast import LinkForecast

SEEDS = tuple(range(900, 905))
SECONDS = PLOTTED_SECONDS = 400
PROCESSES = 4
GOALS = {"convoys": 1.15, "highway": 1.15, "static": 1.0}
"""Minimum speed-up over `links`, by kind of fleet."""
WAYS = ("links", "links, fresh", "learned", "spectral", "k-means", "random")


def ways() -> dict[str, Way]:
    """Return all methods by name."""
    made = (
        Way(by_links, fresh=False),
        Way(by_links),
        Way(by_links, model=shipped_model()),
        Way(by_spectrum),
        Way(by_k_means),
        Way(by_random),
    )
    return dict(zip(WAYS, made, strict=True))


def outcome(kind: str, workers: int, seconds: int, case: tuple[int, str]) -> Exchanged:
    """Return the result of one fleet, by its seed, with one method."""
    seed, name = case
    fleet, way = make_fleet(kind, workers, seed, seconds), ways()[name]
    return exchange(fleet, way, reports_of(fleet, fresh=way.fresh), seed=seed)


def print_exchanges(
    workers: int, seconds: int, seeds: Sequence[int], kinds: Sequence[str], names: Sequence[str]
) -> None:
    """Print a row for each kind: seconds to the rounds of the slowest method, and the ratios."""
    print(f"| fleet | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    ratios: dict[str, dict[str, list[float]]] = {}
    for kind in kinds:
        cases = [(seed, name) for seed in seeds for name in names]
        with ProcessPoolExecutor(PROCESSES) as pool:
            made = dict(
                zip(cases, pool.map(partial(outcome, kind, workers, seconds), cases), strict=True)
            )
        rounds = {seed: _rounds({name: made[seed, name] for name in names}) for seed in seeds}
        times = {
            name: [made[seed, name].seconds_to(rounds[seed]) for seed in seeds] for name in names
        }
        cells = []
        for name, each in times.items():
            rand = statistics.fmean(made[seed, name].rand_index for seed in seeds)
            changes = statistics.fmean(made[seed, name].changes for seed in seeds)
            cells.append(
                f"{statistics.fmean(each):.0f} s ({min(each):.0f} to {max(each):.0f}), "
                f"Rand {rand:.2f}, {changes:.1f} changes"
            )
        print(f"| {kind}, {workers} | {' | '.join(cells)} |", flush=True)
        ratios[kind] = {
            name: [a / b for a, b in zip(times[name], times["learned"], strict=True)]
            for name in names
        }
    print()
    for kind, by_name in ratios.items():
        texts = [
            f"{name} {statistics.geometric_mean(values):.2f} "
            f"({min(values):.2f} to {max(values):.2f})"
            for name, values in by_name.items()
            if name != "learned"
        ]
        print(f"{kind}, learned sooner than: {', '.join(texts)}")
    for kind in kinds:
        mean, goal = statistics.geometric_mean(ratios[kind]["links"]), GOALS[kind]
        verdict = "yes" if mean > goal - 0.001 else "no"
        print(f"{kind}: {mean:.2f} times sooner than links; goal {goal:.2f}: {verdict}")


def _rounds(found: dict[str, Exchanged]) -> int:
    return min(len(each.rounds_at_s) for name, each in found.items() if name != "random")


def print_planted() -> None:
    """Print the adjusted Rand index of groups that are planted in the rates of links."""
    print("| workers | noise | links | learned | spectral | k-means | random |")
    print(f"|{'---|' * 7}")
    for workers in (50, 200):
        for noise in (0.2, 0.4, 0.8):
            scores = [_planted(workers, noise, seed) for seed in range(900, 910)]
            cells = [
                f"{statistics.fmean(each):.3f} ({min(each):.3f})"
                for each in ([score[name] for score in scores] for name in scores[0])
            ]
            print(f"| {workers} | {noise:g} | {' | '.join(cells)} |", flush=True)


def _planted(workers: int, noise: float, seed: int) -> dict[str, float]:
    """Return fast links (20 Mbit/s) inside groups of different sizes and slow ones (1 Mbit/s)
    between.

    Each direction has log-normal noise.
    """
    rng = np.random.default_rng(seed)
    groups = round(math.sqrt(workers / 2))
    home_N = np.concatenate(
        [np.repeat(np.arange(groups), 3), rng.integers(0, groups, workers - 3 * groups)]
    )
    everyone = [Rank(rank) for rank in range(workers)]
    reported = {
        (one, other): (2.5e6 if home_N[one] == home_N[other] else 1.25e5)
        * float(np.exp(rng.normal(0, noise)))
        for one in everyone
        for other in everyone
        if one != other
    }
    slower = {
        (one, other): min(rate, reported[other, one])
        for (one, other), rate in reported.items()
        if one < other
    }
    predicted = LinkForecast(shipped_model()).rates(everyone, reported, 0.0)
    found = {
        "links": find_groups(slower, SEPARATION),
        "learned": find_groups(predicted, SEPARATION),
        "spectral": by_spectrum(groups, seed)(slower, SEPARATION),
        "k-means": by_k_means(groups, seed)(slower, SEPARATION),
        "random": by_random(groups, seed)(slower, SEPARATION),
    }
    scores = {}
    for name, made in found.items():
        label = {rank: at for at, group in enumerate(made) for rank in group}
        scores[name] = float(adjusted_rand_score(home_N, [label[rank] for rank in everyone]))
    return scores


def print_cost() -> None:
    """Print CPU seconds of the decider's prediction at one check, in plain Python."""
    for workers in (10, 50, 200):
        fleet = make_fleet("convoys", workers, 900, 20)
        known: dict[tuple[Rank, Rank], float] = {}
        for news in reports_of(fleet, fresh=True):
            known.update(news)
        forecast = LinkForecast(shipped_model())
        forecast.rates(range(workers), known, 0.0)
        began_s = time.process_time()
        forecast.rates(range(workers), known, 5.0)
        print(f"{workers} workers: {time.process_time() - began_s:.3f} s of CPU for a check")


def plot(path: Path) -> None:
    """Draw rounds over time in one held-out fleet."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "clustering", "svg.fonttype": "none", "font.size": 9})
    with ProcessPoolExecutor(PROCESSES) as pool:
        cases = [(SEEDS[0], name) for name in WAYS]
        made = pool.map(partial(outcome, "convoys", 50, PLOTTED_SECONDS), cases)
        found = dict(zip(WAYS, made, strict=True))
    figure, axes = plt.subplots(figsize=(8, 3.6))
    colours = ("#999999", "#d98200", "#0b6fb8", "#3a7d44", "#8e5ea2", "#b00020")
    for (name, each), colour in zip(found.items(), colours, strict=True):
        minutes = [at_s / 60 for at_s in each.rounds_at_s]
        axes.plot(minutes, range(1, len(minutes) + 1), color=colour, linewidth=1.2, label=name)
    axes.set_xlabel("minutes")
    axes.set_ylabel("rounds of the exchange")
    axes.legend(frameon=False, ncols=2)
    figure.suptitle("50 workers in five convoys that meet and exchange members", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=50)
    parser.add_argument("--seconds", type=int, default=SECONDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--kinds", choices=GOALS, nargs="+", default=list(GOALS))
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--jobs", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seed", type=int, default=1, help="of training")
    options = parser.parse_args()
    if options.train:
        train(MODEL_FILE, options.seed)
        return
    if options.plot:
        plot(options.plot)
        return
    print(f"commit {commit()}\n")
    if options.planted:
        print_planted()
    elif options.jobs:
        print_jobs(options.workers, options.seeds, options.kinds)
    elif options.cost:
        print_cost()
    else:
        print_exchanges(
            options.workers, options.seconds, options.seeds, options.kinds, options.ways
        )


if __name__ == "__main__":
    main()

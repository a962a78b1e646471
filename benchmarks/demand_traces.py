"""Co-located demand of `demand.py`: recipes of traces, as phases of seconds and cores.

We know of no package with CPU traces of co-located work, so all are generated. A recipe draws its
numbers from a seed. The four workers of a job have four cores each; the job names the recipe of
each worker, or None for a machine without other work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

CORES = 4.0
SECONDS = 2400.0

Phases = tuple[tuple[float, float], ...]
Recipe = Callable[[np.random.Generator], Iterator[tuple[float, float]]]


def cron(every_s: float, busy_s: float, cores: float, jitter_s: float = 0.0) -> Recipe:
    """Run a task every `every_s`, from a random offset; each start and length may vary."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        start_s = random.uniform(0.1, every_s)
        now_s = 0.0
        while True:
            begin_s = max(now_s + 0.1, start_s + random.normal(0.0, 1.0) * jitter_s)
            length_s = max(0.5, busy_s + random.normal(0.0, 1.0) * jitter_s)
            yield begin_s - now_s, 0.0
            yield length_s, cores
            now_s, start_s = begin_s + length_s, start_s + every_s

    return made


def sums(*recipes: Recipe) -> Recipe:
    """Combine several kinds of work on one machine."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        parts = [recipe(random) for recipe in recipes]
        now = [list(next(part)) for part in parts]
        while True:
            step_s = min(left for left, _ in now)
            yield step_s, min(CORES, sum(cores for _, cores in now))
            for index, part in enumerate(parts):
                now[index][0] -= step_s
                if now[index][0] <= 1e-9:
                    now[index] = list(next(part))

    return made


def wave(period_s: float, cores: float, noise: float = 0.0) -> Recipe:
    """Return a compressed day: a sine with noise, a level every five seconds."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        phase, now_s = random.uniform(0.0, 2 * math.pi), 0.0
        while True:
            level = 0.5 * cores * (1 - math.cos(2 * math.pi * now_s / period_s + phase))
            yield 5.0, min(CORES, max(0.0, level + random.normal(0.0, noise)))
            now_s += 5.0

    return made


def ramps(up_s: float, cores: float, rest_s: float) -> Recipe:
    """Return work that grows evenly and ends at once."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        yield random.uniform(1.0, up_s), 0.0
        while True:
            length_s = up_s * random.uniform(0.8, 1.2)
            steps = max(2, round(length_s / 2))
            for step in range(steps):
                yield length_s / steps, cores * (step + 1) / steps
            yield rest_s * random.uniform(0.8, 1.2), 0.0

    return made


def bursts(gap_s: float, busy_s: float, cores: float) -> Recipe:
    """Return tasks of similar length at random times (exponential gaps)."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        while True:
            yield 0.5 + random.exponential(gap_s), 0.0
            yield busy_s * random.uniform(0.95, 1.05), cores

    return made


def markov(off_s: float, on_s: float, cores: float) -> Recipe:
    """Return memoryless on and off phases, which cannot be predicted."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        while True:
            yield 0.1 + random.exponential(off_s), 0.0
            yield 0.1 + random.exponential(on_s), cores

    return made


def walk(step_s: float, deviation: float) -> Recipe:
    """Return a random walk between none and three cores."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        level = 1.0
        while True:
            yield step_s, level
            level = min(3.0, max(0.0, level + random.normal(0.0, deviation)))

    return made


def turning(every_s: float, cores: float, stay_s: float) -> Recipe:
    """Return the worst case of the forecaster: a strict cycle that changes once it is learned."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        while True:
            period_s, left_s = every_s * random.uniform(0.7, 1.4), stay_s * random.uniform(0.7, 1.3)
            yield random.uniform(0.1, period_s), 0.0
            while left_s > 0:
                yield period_s / 2, 0.0
                yield period_s / 2, cores
                left_s -= period_s

    return made


def quiet(noise: float) -> Recipe:
    """Return only small processes."""

    def made(random: np.random.Generator) -> Iterator[tuple[float, float]]:
        while True:
            yield random.exponential(2.0) + 0.1, abs(random.normal(0.0, noise))

    return made


Job = tuple[Recipe | None, ...]
"""Recipes by worker."""

TUNING: dict[str, Job] = {
    "cron 40 s": (cron(40, 15, 2), None, None, None),
    "cron 60 s, jitter 1 s": (cron(60, 20, 2, 1.0), cron(60, 20, 2, 1.0), None, None),
    "two crons": (sums(cron(30, 10, 1), cron(70, 20, 1)), None, None, None),
    "cron on all": tuple(cron(45, 18, 2) for _ in range(4)),
    "day of 20 min": (wave(1200, 3, 0.2), wave(1200, 3, 0.2), None, None),
    "ramps 60 s": (ramps(60, 2.5, 30), None, ramps(60, 2.5, 30), None),
    "bursts of 12 s": (bursts(25, 12, 2), bursts(25, 12, 2), None, None),
    "on and off at random": (markov(20, 10, 2), markov(20, 10, 2), None, None),
    "random walk": (walk(5, 0.4), walk(5, 0.4), walk(5, 0.4), None),
    "turning cycles": (turning(24, 2, 240), turning(24, 2, 240), None, None),
    "quiet": tuple(quiet(0.1) for _ in range(4)),
}
HELD_OUT: dict[str, Job] = {
    "cron 25 s": (cron(25, 10, 2), None, None, None),
    "cron 50 s, jitter 2 s": (cron(50, 15, 2, 2.0), None, cron(50, 15, 1.5, 2.0), None),
    "cron 90 s beside a day": (sums(cron(90, 30, 1.5), wave(900, 1)), None, None, None),
    "three crons": (cron(35, 14, 2), cron(55, 22, 1.5), cron(20, 8, 1), None),
    "cron 120 s on all": tuple(cron(120, 40, 2) for _ in range(4)),
    "day of 10 min": (wave(600, 3, 0.3), None, wave(600, 2, 0.3), None),
    "ramps 30 s": (ramps(30, 2.5, 20), ramps(30, 2.5, 20), None, None),
    "bursts of 8 s": (bursts(15, 8, 2), None, None, bursts(15, 8, 2)),
    "on and off at random, fast": (markov(8, 6, 2), markov(8, 6, 2), None, None),
    "random walk, slow": (walk(10, 0.5), walk(10, 0.5), None, None),
    "turning cycles, fast": (turning(16, 2, 150), None, turning(16, 2, 150), None),
    "cron among bursts": (sums(cron(40, 12, 1.5), bursts(40, 10, 1)), cron(40, 12, 2), None, None),
}


def phases(recipe: Recipe, seed: int, seconds: float = SECONDS) -> Phases:
    """Return a trace of at least `seconds`."""
    random, made, total_s = np.random.default_rng(seed), [], 0.0
    for length_s, cores in recipe(random):
        made.append((length_s, cores))
        total_s += length_s
        if total_s >= seconds:
            return tuple(made)
    raise AssertionError("recipes do not end")

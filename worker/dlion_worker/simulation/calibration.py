"""What computing costs on this machine: a + b x batch, in CPU seconds of one core.

Owns the measurement, the fit and its form as a file. Called by `dlion calibrate`, which says what a
step is, and by `dlion simulate`, which reads the file. Nothing is simulated here.

Shape suffixes: N observations, R rounds or draws of rounds, K terms of the fit.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dlion_api.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

VERSION: Final = 1
"""Of the file; another one means something else."""

LEAST_OBSERVATION_S = 0.1
"""Steps are repeated until they took so long: below, the process's CPU clock is too coarse."""

CONFIDENCE = 0.95
RESAMPLES = 2000
_LEAST_BATCHES, _LEAST_ROUNDS = 2, 3
MOST_BYTES = 1 << 20

LEAST_COST_S = 1e-12
"""Of a sample: a file with less is no calibration."""

MOST_RELATIVE_WEIGHT = 25.0
"""An observation weighs by 1 / cost^2, as if it had cost at least a fifth of the median: one that
cost next to nothing is an error of the clock, and no law of all others."""

LEAST_SPREAD_FRACTION = 0.1
"""Of batch sizes, standard deviation over mean: below, a and b cannot be told apart."""


@dataclass(frozen=True)
class Estimate:
    """A value and the bounds within which it lies with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Observation:
    """One batch size in one round: seconds per step, over so many steps."""

    batch_size: int
    round_number: int
    cpu_s: float
    wall_s: float
    steps: int


@dataclass(frozen=True)
class Calibration:
    """The law of one program on one machine, and how well it holds."""

    fixed_core_s: Estimate
    """a: what a step costs beside its samples."""
    per_sample_core_s: Estimate
    """b."""
    residual_fraction: float
    """Root mean square of measured / fitted - 1: noise, and what the law leaves out."""
    wall_per_cpu: float
    """Median; above 1 others had the core meanwhile."""
    program: str
    machine: str
    observations: tuple[Observation, ...]

    @property
    def samples_per_s_per_core(self) -> float:
        """1 / b: what an environment calls `samplesPerSPerCore`."""
        return 1.0 / self.per_sample_core_s.value

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": VERSION,
            "program": self.program,
            "machine": self.machine,
            "fixedCoreS": asdict(self.fixed_core_s),
            "perSampleCoreS": asdict(self.per_sample_core_s),
            "samplesPerSPerCore": self.samples_per_s_per_core,
            "residualFraction": self.residual_fraction,
            "wallPerCpu": self.wall_per_cpu,
            "confidence": CONFIDENCE,
            "observations": [
                {
                    "batchSize": one.batch_size,
                    "round": one.round_number,
                    "cpuS": one.cpu_s,
                    "wallS": one.wall_s,
                    "steps": one.steps,
                }
                for one in self.observations
            ],
        }


def measure(
    step: Callable[[int], object],
    batch_sizes: Sequence[int],
    *,
    rounds: int,
    cpu_s: Callable[[], float] = time.process_time,
    wall_s: Callable[[], float] = time.perf_counter,
    on_observation: Callable[[Observation], None] = lambda _one: None,
) -> tuple[Observation, ...]:
    """Times steps of every batch size, once in each round, in another order every time.

    The first step of each size, which gets memory and may compile, does not count. Rounds rather
    than one size after the other: a machine that slows down does so for all sizes then.
    """
    for batch_size in batch_sizes:
        step(batch_size)
    order = np.random.default_rng(0)
    observations = []
    for number in range(1, rounds + 1):
        for batch_size in order.permutation(list(batch_sizes)).tolist():
            step(batch_size)  # the caches hold what the size before has left
            steps, began_cpu_s, began_wall_s = 0, cpu_s(), wall_s()
            while not steps or cpu_s() - began_cpu_s < LEAST_OBSERVATION_S:
                step(batch_size)
                steps += 1
            used_s, passed_s = cpu_s() - began_cpu_s, wall_s() - began_wall_s
            one = Observation(batch_size, number, used_s / steps, passed_s / steps, steps)
            observations.append(one)
            on_observation(one)
    return tuple(observations)


def fit(
    observations: Sequence[Observation], *, program: str = "", machine: str = ""
) -> Calibration:
    """The law by least squares of relative errors, which are alike for small and large batches.

    Confidence by drawing rounds with replacement, so that what disturbs a round stays together.
    The fixed part is never below 0. Source: bootstrap percentile intervals, Efron 1979.

    Raises:
        ValueError: fewer than two batch sizes or three rounds.
        DataError: larger batches cost no more than small ones, so that nothing is learnt of b.
    """
    batch_N = np.array([one.batch_size for one in observations], np.float64)
    cost_N = np.array([one.cpu_s for one in observations], np.float64)
    round_N = np.array([one.round_number for one in observations])
    rounds = np.unique(round_N)
    if len(np.unique(batch_N)) < _LEAST_BATCHES or len(rounds) < _LEAST_ROUNDS:
        msg = f"{len(np.unique(batch_N))} batch sizes, {len(rounds)} rounds; allowed: 2, 3 or more"
        raise ValueError(msg)
    terms_NK = _terms(batch_N, cost_N)
    terms_RK = np.stack([terms_NK[round_N == number].sum(0) for number in rounds])
    (fixed_s,), (sample_s,) = _laws(terms_RK.sum(0)[None])
    if not sample_s >= LEAST_COST_S:
        raise DataError(
            "larger batches cost no more than small ones, so a sample's cost cannot be told (by "
            f"the law {sample_s:.3g} s). Give batches that are further apart (--batches) and more "
            "rounds (--rounds), or measure when less else is going on"
        )
    drawn = np.random.default_rng(0).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    fixed_R, sample_R = _laws(terms_RK[drawn].sum(1))
    residual_N = cost_N / (fixed_s + sample_s * batch_N) - 1
    return Calibration(
        fixed_core_s=_estimate(float(fixed_s), fixed_R),
        per_sample_core_s=_estimate(float(sample_s), sample_R),
        residual_fraction=float(np.sqrt(np.mean(residual_N**2))),
        wall_per_cpu=float(np.median([one.wall_s / one.cpu_s for one in observations])),
        program=program,
        machine=machine,
        observations=tuple(observations),
    )


def law(batch_N: NDArray[np.float64], cost_N: NDArray[np.float64]) -> tuple[float, float]:
    """a >= 0 and b > 0 of those observations, of which each cost something.

    a is 0 where all batches are (nearly) of one size, and where larger ones seem to cost no more.
    """
    if batch_N.std() >= LEAST_SPREAD_FRACTION * batch_N.mean():
        (fixed_s,), (sample_s,) = _laws(_terms(batch_N, cost_N).sum(0)[None])
        if sample_s >= LEAST_COST_S:
            return float(fixed_s), float(sample_s)
    return 0.0, max(LEAST_COST_S, float(np.median(cost_N / batch_N)))


def _terms(batch_N: NDArray[np.float64], cost_N: NDArray[np.float64]) -> NDArray[np.float64]:
    scale_N = np.maximum(cost_N, np.median(cost_N) / math.sqrt(MOST_RELATIVE_WEIGHT))
    weight_N = 1 / scale_N**2
    right_N = weight_N * cost_N
    columns = [weight_N, weight_N * batch_N, weight_N * batch_N**2, right_N, right_N * batch_N]
    return np.stack(columns, axis=1)


def _laws(terms_RK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """a >= 0 and b with the least sum of ((a + b n) / cost - 1)^2, for sums of observations.

    K: the sums of w, w n, w n^2, w c and w n c, with w = 1/c^2.
    """
    ones, batches, squares, right, right_batches = terms_RK.T
    determinant = ones * squares - batches**2
    fixed_R = (right * squares - right_batches * batches) / determinant
    sample_R = (right_batches * ones - right * batches) / determinant
    through_zero_R = right_batches / squares
    return np.maximum(fixed_R, 0.0), np.where(fixed_R >= 0, sample_R, through_zero_R)


def _estimate(value: float, drawn_R: NDArray[np.float64]) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn_R, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def read_costs(path: Path) -> tuple[float, float]:
    """a and b of a file that `dlion calibrate` wrote, in core seconds.

    Raises: DataError where it is not one, or another version's.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        document = json.loads(content)
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        if document.get("version") != VERSION:
            raise ValueError(f"version {document.get('version')!r}; allowed: {VERSION}")
        return (
            _value(document, "fixedCoreS", least=0.0),
            _value(document, "perSampleCoreS", least=LEAST_COST_S),
        )
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: is no calibration ({error}). Make one with `dlion calibrate --out FILE`"
        ) from error


def _value(document: Mapping[str, Any], name: str, *, least: float) -> float:
    estimate = document.get(name)
    value = estimate.get("value") if isinstance(estimate, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}.value: not a number")
    if not least <= value <= 1e6:  # also nan, and integers beyond any float
        raise ValueError(f"{name}.value: {f'{value}':.40}; allowed: {least:g} to 1e6")
    return float(value)

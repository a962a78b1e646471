"""Measures what computing costs on this machine: a + b x batch, in CPU seconds of one core.

Contains the measurement, the fit and the file format. `dlion calibrate` supplies the step; `dlion
simulate` reads the file.

Shape suffixes: N observations, R rounds or draws of rounds, K terms of the fit.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DataError

VERSION: Final = 1
"""Version of the file format."""

MIN_OBSERVATION_S = 0.1
"""Steps are repeated for at least this long: the process's CPU clock is coarse."""

CONFIDENCE = 0.95
RESAMPLES = 2000
_MIN_BATCHES, _MIN_ROUNDS = 2, 3
MAX_FILE_BYTES = 1 << 20

MIN_COST_S = 1e-12
"""Minimum cost of a sample in a valid calibration."""

MAX_RELATIVE_WEIGHT = 25.0
"""Bounds the weight 1 / cost^2 of an observation, as if it had cost at least a fifth of the median.
A near-zero cost is a clock error and must not dominate the fit."""

MIN_SPREAD_FRACTION = 0.1
"""Minimum standard deviation over mean of the batch sizes. With less, a and b are not
identifiable."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Observation:
    """One batch size in one round: seconds per step, over `steps` steps."""

    batch_size: int
    round_number: int
    cpu_s: float
    wall_s: float
    steps: int


@dataclass(frozen=True)
class Calibration:
    """The cost model of one program on one machine, and its quality."""

    fixed_core_s: Estimate
    """a: cost of a step beside its samples."""
    per_sample_core_s: Estimate
    """b: cost of a sample."""
    residual_fraction: float
    """Root mean square of measured / fitted - 1."""
    wall_per_cpu: float
    """Median; above 1, other processes used the core."""
    program: str
    machine: str
    observations: tuple[Observation, ...]

    @property
    def samples_per_s_per_core(self) -> float:
        """1 / b: `samplesPerSPerCore` of an environment."""
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
    """Time steps of every batch size, once per round, in a random order.

    The first step of each size is not counted: it allocates memory and may compile. Rounds spread a
    slowdown of the machine over all sizes.
    """
    for batch_size in batch_sizes:  # not counted: may compile
        step(batch_size)
    rng = np.random.default_rng(0)
    observations = []
    for number in range(1, rounds + 1):
        for batch_size in rng.permutation(list(batch_sizes)).tolist():
            step(batch_size)  # warms the caches for this size
            steps, began_cpu_s, began_wall_s = 0, cpu_s(), wall_s()
            while not steps or cpu_s() - began_cpu_s < MIN_OBSERVATION_S:
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
    """Fit the cost model by least squares of relative errors, which are similar for all batches.

    Confidence intervals resample whole rounds, so that correlated noise stays together. The fixed
    part is never negative. Raises ValueError for fewer than two batch sizes or three rounds, and
    DataError if larger batches cost no more than small ones. Source: bootstrap percentile
    intervals, Efron 1979.
    """
    batch_N = np.array([one.batch_size for one in observations], np.float64)
    cost_N = np.array([one.cpu_s for one in observations], np.float64)
    round_N = np.array([one.round_number for one in observations])
    rounds = np.unique(round_N)
    if len(np.unique(batch_N)) < _MIN_BATCHES or len(rounds) < _MIN_ROUNDS:
        msg = f"{len(np.unique(batch_N))} batch sizes, {len(rounds)} rounds; allowed: 2, 3 or more"
        raise ValueError(msg)
    terms_NK = _terms(batch_N, cost_N)
    terms_RK = np.stack([terms_NK[round_N == number].sum(0) for number in rounds])
    (fixed_s,), (sample_s,) = _solve(terms_RK.sum(0)[None])
    if not sample_s >= MIN_COST_S:
        raise DataError(
            "larger batches cost no more than small ones, so a sample's cost is unknown (the "
            f"fit gives {sample_s:.3g} s). Use batch sizes that are further apart (--batches) and "
            "more rounds (--rounds), or measure on an idle machine"
        )
    drawn = np.random.default_rng(0).integers(len(rounds), size=(RESAMPLES, len(rounds)))
    fixed_R, sample_R = _solve(terms_RK[drawn].sum(1))
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


def fit_line(batch_N: NDArray[np.float64], cost_N: NDArray[np.float64]) -> tuple[float, float]:
    """Fit a >= 0 and b > 0 to observations with positive costs.

    a is 0 if all batches have nearly one size, or if larger ones seem to cost no more.
    """
    if batch_N.std() >= MIN_SPREAD_FRACTION * batch_N.mean():
        (fixed_s,), (sample_s,) = _solve(_terms(batch_N, cost_N).sum(0)[None])
        if sample_s >= MIN_COST_S:
            return float(fixed_s), float(sample_s)
    return 0.0, max(MIN_COST_S, float(np.median(cost_N / batch_N)))


def _terms(batch_N: NDArray[np.float64], cost_N: NDArray[np.float64]) -> NDArray[np.float64]:
    scale_N = np.maximum(cost_N, np.median(cost_N) / math.sqrt(MAX_RELATIVE_WEIGHT))
    weight_N = 1 / scale_N**2
    right_N = weight_N * cost_N
    columns = [weight_N, weight_N * batch_N, weight_N * batch_N**2, right_N, right_N * batch_N]
    return np.stack(columns, axis=1)


def _solve(terms_RK: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Minimise the sum of ((a + b n) / cost - 1)^2 with a >= 0, for sums of observations. K: the
    sums of w, w n, w n^2, w c and w n c, with w = 1/c^2."""
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
    """Read a and b, in core seconds, from a file of `dlion calibrate`. Raises DataError if it is
    not such a file, or has another version."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
        document = json.loads(content)
        if not isinstance(document, dict):
            raise ValueError("not a JSON object")
        if document.get("version") != VERSION:
            raise ValueError(f"version {document.get('version')!r}; allowed: {VERSION}")
        return (
            _estimate_value(document, "fixedCoreS", least=0.0),
            _estimate_value(document, "perSampleCoreS", least=MIN_COST_S),
        )
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: is not a calibration ({error}). Make one with `dlion calibrate --out FILE`"
        ) from error


def _estimate_value(document: Mapping[str, Any], name: str, *, least: float) -> float:
    estimate = document.get(name)
    value = estimate.get("value") if isinstance(estimate, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}.value: not a number")
    if not least <= value <= 1e6:  # also nan, and integers beyond any float
        raise ValueError(f"{name}.value: {f'{value}':.40}; allowed: {least:g} to 1e6")
    return float(value)

"""Learns how a machine's temperature follows its load. Pure: time is an argument.

Three unknowns need no NumPy, which sidecars do not load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

FILTER_S = 8.0
"""Time constant of the filters that stand in for a derivative: some samples, so that a sensor of
whole degrees is enough."""

MEMORY_S = 1200.0
"""Time constant of forgetting: longer than a fanless machine needs to warm up."""

OFFSET_S = 40.0
"""Time constant of following what the model does not know, such as the sun or other processes."""

NOISE_K = 0.5
"""Deviation of a reading that counts as noise: a sensor of whole degrees has 0.3 K."""

FIRST_RATE_K_PER_S = 0.05
"""Warming by a fully used processor before anything is known; only a starting point."""
FIRST_COOLING_PER_S = 1 / 600
_DEVIATIONS_3 = (0.5, 0.5, 0.01)
"""How far the parameters may be from the starting point: the least of information that is kept."""

MIN_RATE_K_PER_S = 1e-4
MIN_COOLING_PER_S = 1e-5
MAX_COOLING_PER_S = 1.0
"""Bounds of the physics: load warms, and warmth flows away."""

MAX_STEP_S = 60.0
"""A longer pause between samples is a gap: the filters restart after it."""


@dataclass(frozen=True)
class ThermalParameters:
    """`dT/dt = drift + rate x share - cooling x (T - reference)`, in kelvin and seconds.

    With heat capacity C, resistance R, power P and ambient A: `rate` is (P_busy - P_idle) / C,
    `cooling` is 1 / (R C), and `drift` is P_idle / C + (A - reference) / (R C).
    """

    reference_celsius: float
    drift_k_per_s: float
    rate_k_per_s: float
    cooling_per_s: float

    def after(self, celsius: float, share: float, seconds: float) -> float:
        """Temperature after `seconds` with that share of compute: the exact solution.

        >>> model = ThermalParameters(20.0, 0.0, rate_k_per_s=0.5, cooling_per_s=0.01)
        >>> round(model.after(20.0, 1.0, 100.0), 2), round(model.after(20.0, 1.0, 1e9), 2)
        (51.61, 70.0)
        """
        steady = self.steady(share)
        return steady + (celsius - steady) * math.exp(-self.cooling_per_s * seconds)

    def steady(self, share: float) -> float:
        """Temperature that it tends to with that share of compute."""
        warming = self.drift_k_per_s + self.rate_k_per_s * share
        return self.reference_celsius + warming / self.cooling_per_s

    def share_for(self, celsius: float, target_celsius: float, seconds: float) -> float:
        """Share of compute that leads from `celsius` to the target in `seconds`; may be outside of
        0 to 1. The inverse of `after`.

        >>> model = ThermalParameters(20.0, 0.0, rate_k_per_s=0.5, cooling_per_s=0.01)
        >>> round(model.share_for(20.0, model.after(20.0, 0.7, 30.0), 30.0), 9)
        0.7
        """
        kept = math.exp(-self.cooling_per_s * seconds)
        steady = (target_celsius - celsius * kept) / (1.0 - kept)
        warming = (steady - self.reference_celsius) * self.cooling_per_s
        return (warming - self.drift_k_per_s) / self.rate_k_per_s


class ThermalModel:
    """Recursive least squares with forgetting over samples of temperature and share of compute.

    A low-pass filter with the rate l commutes with the linear equation. So l (T - T_f) equals
    drift 1_f + rate u_f - cooling T_f exactly, where the index f marks a filtered signal. So no
    reading is differentiated. All filters start at zero, at the first temperature as the reference.

    What an operating point does not show stays at its last estimate: forgetting replaces old
    information by a little information on the present parameters, not by none. A short mean of the
    residuals follows what changes faster than the model forgets.

    Source: least squares with forgetting and filtered regressors are standard (Ljung, System
    Identification); keeping the last estimate is ours.
    """

    def __init__(self) -> None:
        self._reference_celsius: float | None = None
        self._time_s = self._above_k = 0.0
        self._filtered_3 = [0.0, 0.0, 0.0]
        """Filtered 1, share, and negative temperature above the reference."""
        self._theta_3 = [0.0, FIRST_RATE_K_PER_S, FIRST_COOLING_PER_S]
        self._information_33 = [[0.0] * 3 for _ in range(3)]
        for index, deviation in enumerate(_DEVIATIONS_3):
            self._information_33[index][index] = deviation**-2
        self._weighted_3 = _product(self._information_33, self._theta_3)
        self._offset_k_per_s = 0.0

    def add(self, now_s: float, celsius: float, share: float) -> None:
        """Add a reading, and the mean share of compute since the one before."""
        step_s = now_s - self._time_s
        if self._reference_celsius is None or step_s > MAX_STEP_S:
            self._restart(now_s, celsius)
            return
        if step_s <= 0:
            return
        self._time_s = now_s
        above_k, before_k = celsius - self._reference_celsius, self._above_k
        self._above_k = above_k
        kept = math.exp(-step_s / FILTER_S)
        # Exact for a share that stays and a temperature that changes evenly between two samples.
        even_k = above_k - kept * before_k - (above_k - before_k) * FILTER_S / step_s * (1 - kept)
        inputs_3 = (1 - kept, (1 - kept) * share, -even_k)
        self._filtered_3 = [
            kept * before + new for before, new in zip(self._filtered_3, inputs_3, strict=True)
        ]
        slope = (above_k + self._filtered_3[2]) / FILTER_S
        self._learn(self._filtered_3, slope, step_s)

    def _restart(self, now_s: float, celsius: float) -> None:
        """Start the filters. The parameters stay, for the new reference."""
        before = self._reference_celsius
        if before is not None:
            # drift is relative to the reference: dT/dt at a given temperature stays the same.
            self._theta_3[0] -= self._theta_3[2] * (celsius - before)
            self._weighted_3 = _product(self._information_33, self._theta_3)
        self._reference_celsius, self._time_s = celsius, now_s
        self._above_k = 0.0
        self._filtered_3 = [0.0, 0.0, 0.0]

    def _learn(self, filtered_3: Sequence[float], slope: float, step_s: float) -> None:
        variance = (NOISE_K / FILTER_S) ** 2
        kept = math.exp(-step_s / MEMORY_S)
        for i, own in enumerate(filtered_3):
            least = (1 - kept) * _DEVIATIONS_3[i] ** -2
            for j, other in enumerate(filtered_3):
                self._information_33[i][j] *= kept
                self._information_33[i][j] += own * other / variance
            self._information_33[i][i] += least
            self._weighted_3[i] *= kept
            self._weighted_3[i] += least * self._theta_3[i] + own * slope / variance
        self._theta_3 = _solved(self._information_33, self._weighted_3)
        drift, rate, cooling = self._bounded_3
        predicted = drift * filtered_3[0] + rate * filtered_3[1] + cooling * filtered_3[2]
        change = (slope - predicted) - self._offset_k_per_s
        self._offset_k_per_s += (1 - math.exp(-step_s / OFFSET_S)) * change

    @property
    def _bounded_3(self) -> tuple[float, float, float]:
        drift, rate, cooling = self._theta_3
        cooling = min(max(cooling, MIN_COOLING_PER_S), MAX_COOLING_PER_S)
        return drift, max(rate, MIN_RATE_K_PER_S), cooling

    @property
    def parameters(self) -> ThermalParameters:
        """The present estimate. Raises ValueError before the first reading."""
        if self._reference_celsius is None:
            raise ValueError("no reading yet")
        drift, rate, cooling = self._bounded_3
        return ThermalParameters(
            self._reference_celsius, drift + self._offset_k_per_s, rate, cooling
        )


def _product(matrix_33: Sequence[Sequence[float]], vector_3: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector_3, strict=True)) for row in matrix_33]


def _solved(matrix_33: Sequence[Sequence[float]], right_3: Sequence[float]) -> list[float]:
    """Solve by elimination; the matrix is symmetric and positive, so that no pivot is zero."""
    rows = [[*row, right] for row, right in zip(matrix_33, right_3, strict=True)]
    for i, pivot in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / pivot[i]
            for k in range(i, len(below)):
                below[k] -= factor * pivot[k]
    solution = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        known = sum(rows[i][k] * solution[k] for k in range(i + 1, len(rows)))
        solution[i] = (rows[i][-1] - known) / rows[i][i]
    return solution

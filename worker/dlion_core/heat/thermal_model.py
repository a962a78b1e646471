"""Learns how a machine's temperature follows its load. Pure: time is an argument."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
_DEVIATIONS_3 = np.array([0.5, 0.5, 0.01])
"""How far the parameters may be from the starting point: the least of information that is kept."""

MIN_RATE_K_PER_S = 1e-4
MIN_COOLING_PER_S = 1e-5
MAX_COOLING_PER_S = 1.0
"""Bounds of the physics: load warms, and warmth flows away."""
_LOWEST_3 = np.array([-np.inf, MIN_RATE_K_PER_S, MIN_COOLING_PER_S])
_HIGHEST_3 = np.array([np.inf, np.inf, MAX_COOLING_PER_S])

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
        self._filtered_3 = np.zeros(3)
        """Filtered 1, share, and negative temperature above the reference."""
        self._theta_3 = np.array([0.0, FIRST_RATE_K_PER_S, FIRST_COOLING_PER_S])
        self._least_33: NDArray[np.float64] = np.diag(_DEVIATIONS_3**-2.0)
        self._information_33 = self._least_33.copy()
        self._weighted_3 = self._information_33 @ self._theta_3
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
        inputs_3 = np.array([1 - kept, (1 - kept) * share, -even_k])
        self._filtered_3 = kept * self._filtered_3 + inputs_3
        slope = (above_k + self._filtered_3[2]) / FILTER_S
        self._learn(self._filtered_3, slope, step_s)

    def _restart(self, now_s: float, celsius: float) -> None:
        """Start the filters. The parameters stay, for the new reference."""
        before = self._reference_celsius
        if before is not None:
            # drift is relative to the reference: dT/dt at a given temperature stays the same.
            self._theta_3[0] -= self._theta_3[2] * (celsius - before)
            self._weighted_3 = self._information_33 @ self._theta_3
        self._reference_celsius, self._time_s = celsius, now_s
        self._above_k = 0.0
        self._filtered_3 = np.zeros(3)

    def _learn(self, filtered_3: NDArray[np.float64], slope: float, step_s: float) -> None:
        variance = (NOISE_K / FILTER_S) ** 2
        kept = math.exp(-step_s / MEMORY_S)
        self._information_33 = (
            kept * self._information_33
            + (1 - kept) * self._least_33
            + np.outer(filtered_3, filtered_3) / variance
        )
        self._weighted_3 = (
            kept * self._weighted_3
            + (1 - kept) * self._least_33 @ self._theta_3
            + filtered_3 * (slope / variance)
        )
        self._theta_3 = np.linalg.solve(self._information_33, self._weighted_3)
        missing = slope - float(self._bounded_3 @ filtered_3)
        self._offset_k_per_s += (1 - math.exp(-step_s / OFFSET_S)) * (
            missing - self._offset_k_per_s
        )

    @property
    def _bounded_3(self) -> NDArray[np.float64]:
        bounded_3: NDArray[np.float64] = self._theta_3.clip(_LOWEST_3, _HIGHEST_3)
        return bounded_3

    @property
    def parameters(self) -> ThermalParameters:
        """The present estimate. Raises ValueError before the first reading."""
        if self._reference_celsius is None:
            raise ValueError("no reading yet")
        drift, rate, cooling = map(float, self._bounded_3)
        return ThermalParameters(
            self._reference_celsius, drift + self._offset_k_per_s, rate, cooling
        )

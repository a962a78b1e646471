"""Chooses the share of compute that keeps a temperature below its threshold. Pure."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from dlion_core.heat.thermal_model import ThermalModel, ThermalParameters

SAMPLE_S = 2.0
"""Interval between samples that the callers keep."""

MEAN_S = 30.0
"""Time constant of the mean share: batches follow it, which should not change at each sample."""

HORIZON_S = 20.0
"""The temperature shall be at its target so many seconds from now. Shorter horizons use the last
kelvins later and react to noise; longer ones slow down early."""

ALLOWED_FRACTION = 0.06
"""The budget: the fraction of time for which the temperature may exceed the threshold."""
AIMED_FRACTION = 0.01
"""The fraction at which the margin aims, so that unforeseen changes fit the budget."""
FIRST_MARGIN_K, MAX_MARGIN_K = 1.0, 8.0
MARGIN_K_PER_S = 0.1
"""How fast the margin grows while the temperature is above the threshold."""

FOLLOWED_FRACTION = 0.15
"""Part of the difference between a reading and its prediction that counts as a real change."""

MIN_CELSIUS, MAX_CELSIUS = -60.0, 200.0
"""No processor works outside of it: such a reading is a fault of the sensor."""
MAX_JUMP_K = 15.0
"""A reading so far from its prediction counts only if the next ones confirm it."""
CONFIRMATIONS = 3

BLIND_AFTER_S = 30.0
"""For this long without a usable reading the last share is kept."""
BLIND_DECAY_S = 60.0
"""Time constant with which the share then falls to its floor."""
FROZEN_K = 6.0
"""A reading that stays the same while the model is sure of such a change is frozen."""
LEARNED_RANGE_K = 4.0
"""Readings must have spread so far before the model is trusted against a sensor."""


class HeatState(StrEnum):
    """What decides the share."""

    UNKNOWN = "Unknown"  # no reading yet: no limit
    FREE = "Free"  # the whole processor keeps below the threshold
    LIMITED = "Limited"
    BLIND = "Blind"  # readings have ended, are frozen or absurd: the share falls to its floor


@dataclass(frozen=True)
class HeatDecision:
    """A share of compute, 0 to 1, and what it rests on."""

    share: float
    state: HeatState
    mean_share: float = 1.0
    """The share without its noise, for decisions that should not follow each sample."""
    celsius: float | None = None
    """Filtered temperature; None: unknown."""
    target_celsius: float | None = None


class HeatController:
    """Predicts the temperature over a horizon and limits the share of compute ahead of time.

    Each sample updates the thermal model. The share is the one that leads to the target at the end
    of the horizon, in closed form, as the model is linear and the share constant over the horizon.
    The target is the threshold less a margin. The margin grows while the temperature is above the
    threshold, and shrinks otherwise, so that the time above tends to `AIMED_FRACTION`.

    Faults of the sensor are on the safe side: without usable readings the share first stays, then
    falls to the floor. A sensor that never gave a reading limits nothing. The floor holds always,
    so that a worker never stops.

    Source: this project. The goal, at least 94 % of the time below a threshold, is that of Sparta,
    of which only the abstract is known; Sparta scales the processor's frequency.
    """

    def __init__(
        self, threshold_celsius: float, min_share: float, *, horizon_s: float = HORIZON_S
    ) -> None:
        """Raises ValueError for a share outside of 0 < share <= 1, or a threshold not finite."""
        if not (0 < min_share <= 1 and math.isfinite(threshold_celsius) and horizon_s > 0):
            raise ValueError(f"{threshold_celsius=}, {min_share=}, {horizon_s=}")
        self._threshold, self._min_share, self._horizon_s = threshold_celsius, min_share, horizon_s
        self._model = ThermalModel()
        self._margin_k = FIRST_MARGIN_K
        self._celsius: float | None = None
        self._now_s = self._usable_s = -math.inf
        self._limit = self._mean_share = 1.0
        self._jumps = 0
        self._range = (math.inf, -math.inf)
        self._frozen = _FrozenCheck()

    @property
    def parameters(self) -> ThermalParameters | None:
        """The learned model; None before the first usable reading."""
        return None if self._celsius is None else self._model.parameters

    def sample(self, now_s: float, celsius: float | None, used_share: float) -> HeatDecision:
        """Return the share from now on, given a reading and the share used since the last sample.

        `celsius` is None without a reading. Times must not go back.
        """
        step_s = max(0.0, now_s - self._now_s) if math.isfinite(self._now_s) else 0.0
        self._now_s = max(now_s, self._now_s)
        is_first = self._celsius is None
        decision = self._decide(now_s, celsius, used_share, step_s)
        change = 1.0 - math.exp(-step_s / MEAN_S)
        self._mean_share += change * (decision.share - self._mean_share)
        if is_first and self._celsius is not None:
            # A sidecar that starts again on a hot machine has no mean to follow from.
            self._mean_share = decision.share
        if decision.share == 1.0 and self._mean_share > 0.99:
            self._mean_share = 1.0
        return replace(decision, mean_share=self._mean_share)

    def _decide(
        self, now_s: float, celsius: float | None, used_share: float, step_s: float
    ) -> HeatDecision:
        used_share = min(max(used_share, 0.0), 1.0) if math.isfinite(used_share) else self._limit
        usable = self._usable(celsius, used_share, step_s)
        if usable is None:
            return self._without_reading(used_share, step_s)
        self._usable_s = now_s
        self._model.add(now_s, usable, used_share)
        self._range = (min(usable, self._range[0]), max(usable, self._range[1]))
        self._celsius = self._filtered(usable, used_share, step_s)
        self._adapt_margin(usable, step_s)
        target = self._threshold - self._margin_k
        wanted = self._model.parameters.share_for(self._celsius, target, self._horizon_s)
        self._limit = min(max(wanted, self._min_share), 1.0)
        state = HeatState.FREE if self._limit >= 1.0 else HeatState.LIMITED
        return HeatDecision(self._limit, state, celsius=self._celsius, target_celsius=target)

    # ---- the sensor ------------------------------------------------------------------------------

    def _usable(self, celsius: float | None, used_share: float, step_s: float) -> float | None:
        """The reading, unless it is missing, absurd, a single jump, or frozen."""
        if celsius is None or not MIN_CELSIUS <= celsius <= MAX_CELSIUS:  # NaN is outside, too
            return None
        if self._celsius is None:
            return celsius
        predicted = self._model.parameters.after(self._celsius, used_share, step_s)
        if abs(celsius - predicted) > MAX_JUMP_K and self._jumps < CONFIRMATIONS:
            self._jumps += 1
            return None
        if self._jumps == CONFIRMATIONS:
            self._celsius = celsius
        self._jumps = 0
        low, high = self._range
        is_learned = high - low >= LEARNED_RANGE_K
        now = self._model.parameters if is_learned else None
        is_frozen = self._frozen.update(celsius, now, used_share, step_s)
        return None if is_frozen and celsius < self._threshold else celsius

    def _filtered(self, celsius: float, used_share: float, step_s: float) -> float:
        if self._celsius is None:
            return celsius
        predicted = self._model.parameters.after(self._celsius, used_share, step_s)
        return predicted + FOLLOWED_FRACTION * (celsius - predicted)

    def _without_reading(self, used_share: float, step_s: float) -> HeatDecision:
        if self._celsius is None:
            return HeatDecision(1.0, HeatState.UNKNOWN)
        self._celsius = self._model.parameters.after(self._celsius, used_share, step_s)
        self._celsius = min(max(self._celsius, MIN_CELSIUS), MAX_CELSIUS)
        blind_s = self._now_s - self._usable_s - BLIND_AFTER_S
        if blind_s <= 0:
            state = HeatState.FREE if self._limit >= 1.0 else HeatState.LIMITED
            return HeatDecision(self._limit, state, celsius=self._celsius)
        above = (self._limit - self._min_share) * math.exp(-blind_s / BLIND_DECAY_S)
        return HeatDecision(self._min_share + above, HeatState.BLIND)

    # ---- the budget ------------------------------------------------------------------------------

    def _adapt_margin(self, celsius: float, step_s: float) -> None:
        """Follow the quantile of the temperature that `AIMED_FRACTION` of the time is above.

        Far below the threshold nothing is learned of it.
        """
        step_k = MARGIN_K_PER_S * min(step_s, SAMPLE_S)
        if celsius > self._threshold:
            self._margin_k += step_k
        elif celsius > self._threshold - self._margin_k - 1.0:
            self._margin_k -= step_k * AIMED_FRACTION / (1 - AIMED_FRACTION)
        self._margin_k = min(max(self._margin_k, 0.0), MAX_MARGIN_K)


class _FrozenCheck:
    """Whether a reading has stayed exactly the same although the temperature must have changed."""

    def __init__(self) -> None:
        self._value = math.nan
        self._expected = math.nan
        self._parameters: ThermalParameters | None = None
        self._is_frozen = False

    def update(
        self, celsius: float, now: ThermalParameters | None, used_share: float, step_s: float
    ) -> bool:
        """Add a reading. The model counts as it was when the value first came: what it has learned
        since, it has learned from the same value. None: not trusted yet."""
        if celsius != self._value:
            self._value = self._expected = celsius
            self._parameters, self._is_frozen = now, False
        elif self._parameters is not None:
            self._expected = self._parameters.after(
                self._expected, used_share, min(step_s, SAMPLE_S)
            )
        # Until it changes: the share that follows may well lead to this temperature.
        self._is_frozen |= abs(self._expected - celsius) > FROZEN_K
        return self._is_frozen

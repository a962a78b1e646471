"""Optimizers on flat NumPy arrays, in place, and the learning rate for a batch size.

Elementwise in a fixed order, so equal inputs give equal bits on every worker. Used by trainer and
simulator. Source: formulas and order of operations of `keras.optimizers.SGD` and `Adam`.
"""

import math
from collections.abc import Mapping

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.spec import Optimizer
from dlion_core.policies.interface import Flat, Value

_BLOCK = 65_536
"""Entries per block: 256 KiB per array, so that temporaries stay in the cache."""

EXACT = 2**20
"""A step count as two floats: its multiples of this, and the rest."""


# NumPy: converting policies' gradients to tensors costs more than TensorFlow's fused update saves.
# CPU milliseconds per update on one core (ours / TensorFlow's with conversion): momentum 0.8 / 2.0
# at 1.1 M parameters, 4.3 / 8.4 at 4.3 M; Adam 2.7 / 2.6 and 10.6 / 11.2.
class FlatOptimizer:
    """SGD (momentum, Nesterov) or Adam over [size] weights, per the manifest."""

    def __init__(self, spec: Optimizer, size: int) -> None:
        self._spec = spec
        self._size = size
        self._steps = 0
        self._rate = np.float32(spec.learning_rate)
        names = {"adam": ["mean", "variance"], "sgd": ["momentum"] if spec.momentum else []}
        self._all = np.zeros((len(names[spec.name]), size), np.float32)
        self._moments: dict[str, Flat] = dict(zip(names[spec.name], self._all, strict=True))
        self._first = np.empty(min(size, _BLOCK), np.float32)
        self._second = np.empty_like(self._first) if spec.name == "adam" else self._first

    def apply(self, weights_D: Flat, gradient_D: Flat, learning_rate: float) -> float:
        """Update `weights_D` once, in place; return the learning rate. The gradient is only
        read."""
        if weights_D.shape != (self._size,) or gradient_D.shape != (self._size,):
            raise ContractError(
                f"optimizer: wrong length (given: weights {list(weights_D.shape)}, gradient "
                f"{list(gradient_D.shape)}; allowed: [{self._size}])"
            )
        self._steps += 1
        rate = np.float32(learning_rate)
        if self._spec.name == "adam":
            rate = np.float32(learning_rate * self._bias_correction())
        self._rate = rate
        for start in range(0, self._size, _BLOCK):
            block = slice(start, min(start + _BLOCK, self._size))
            if self._spec.name == "adam":
                self._adam(weights_D[block], gradient_D[block], block, rate)
            elif self._moments:
                self._momentum(weights_D[block], gradient_D[block], block, rate)
            else:
                self._plain(weights_D[block], gradient_D[block], rate)
        return learning_rate

    def state(self) -> dict[str, Value]:
        """Moments and step count, for a checkpoint."""
        moments: dict[str, Value] = {n: m.copy() for n, m in self._moments.items()}
        return {"steps": self._steps, **moments}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Restore the result of `state`. Raises: ContractError where it is another optimizer's."""
        if set(state) != {"steps", *self._moments}:
            raise ContractError(
                f"optimizer state: given {sorted(state)}; allowed: "
                f"{sorted(['steps', *self._moments])}. It was saved by another optimizer"
            )
        for name, moment_D in self._moments.items():
            value = np.asarray(state[name])
            if value.shape != moment_D.shape:
                raise ContractError(
                    f"optimizer state {name}: wrong length (given: {list(value.shape)}; allowed: "
                    f"[{self._size}])"
                )
            np.copyto(moment_D, value)
        self._steps = int(np.asarray(state["steps"]))

    def resting_D(self, weights_D: Flat) -> Flat:  # noqa: N802 - the shape's suffix
        """Where the weights would settle if all later gradients were zero.

        Moments keep moving the weights after a gradient; this includes that movement. Exact for
        SGD. For Adam it assumes the present variance and learning rate.
        """
        if not self._moments:
            return weights_D.copy()
        if self._spec.name == "sgd":
            factor = self._spec.momentum
            moves = factor / (1 - factor) * (factor if self._spec.nesterov else 1)
            return weights_D + np.float32(moves) * self._moments["momentum"]
        left = np.float32(float(self._rate) * self._spec.beta1 / (1 - self._spec.beta1))
        spread_D: Flat = np.sqrt(self._moments["variance"]) + np.float32(self._spec.epsilon)
        return weights_D - left * self._moments["mean"] / spread_D

    def flat_state(self) -> Flat:
        """Moments and step count as one vector, for a peer that adopts this state."""
        # Two parts, because float32 holds integers only up to 2**24.
        high, low = divmod(self._steps, EXACT)
        return np.concatenate([self._all.ravel(), np.array([high, low], np.float32)])

    def restore_flat(self, state_M: Flat) -> None:
        """Restore a peer's `flat_state`. Raises: ContractError where the length differs."""
        if state_M.shape != (self._all.size + 2,):
            raise ContractError(
                f"optimizer state: wrong length (given: {list(state_M.shape)}; allowed: "
                f"[{self._all.size + 2}]). The peer runs another optimizer or model"
            )
        np.copyto(self._all, state_M[:-2].reshape(self._all.shape))
        self._steps = max(0, int(state_M[-2])) * EXACT + max(0, int(state_M[-1]))

    def _plain(self, weights: Flat, gradient: Flat, rate: np.float32) -> None:
        scaled = self._first[: len(weights)]
        np.multiply(gradient, rate, out=scaled)
        np.subtract(weights, scaled, out=weights)

    def _momentum(self, weights: Flat, gradient: Flat, block: slice, rate: np.float32) -> None:
        scaled = self._first[: len(weights)]
        velocity = self._moments["momentum"][block]
        factor = np.float32(self._spec.momentum)
        np.multiply(gradient, rate, out=scaled)
        np.multiply(velocity, factor, out=velocity)
        np.subtract(velocity, scaled, out=velocity)
        if not self._spec.nesterov:
            np.add(weights, velocity, out=weights)
            return
        np.subtract(weights, scaled, out=weights)
        np.multiply(velocity, factor, out=scaled)
        np.add(weights, scaled, out=weights)

    def _adam(self, weights: Flat, gradient: Flat, block: slice, rate: np.float32) -> None:
        first, second = self._first[: len(weights)], self._second[: len(weights)]
        mean, variance = self._moments["mean"][block], self._moments["variance"][block]
        np.subtract(gradient, mean, out=first)
        np.multiply(first, np.float32(1 - self._spec.beta1), out=first)
        np.add(mean, first, out=mean)
        np.multiply(gradient, gradient, out=second)
        np.subtract(second, variance, out=second)
        np.multiply(second, np.float32(1 - self._spec.beta2), out=second)
        np.add(variance, second, out=variance)
        np.sqrt(variance, out=second)
        np.add(second, np.float32(self._spec.epsilon), out=second)
        np.multiply(mean, rate, out=first)
        np.divide(first, second, out=first)
        np.subtract(weights, first, out=weights)

    def _bias_correction(self) -> float:
        beta1, beta2 = self._spec.beta1, self._spec.beta2
        return math.sqrt(1 - beta2**self._steps) / (1 - beta1**self._steps)


def learning_rate_for(spec: Optimizer, batch_samples: int, *, initial_batch_samples: int) -> float:
    """The learning rate for an update that represents `batch_samples` samples.

    DLion's adaptive model-parameter tuning: the sample count grows with the global batch size and
    drops when workers miss an update. The rate follows by `learningRateScaling`, within a factor of
    `learningRateMaxFactor` in both directions.

    Source: rule ours; linear as Goyal et al. 2017, square root as Krizhevsky 2014.
    """
    ratio = batch_samples / initial_batch_samples
    factor = {"linear": ratio, "sqrt": math.sqrt(ratio)}.get(spec.learning_rate_scaling, 1.0)
    cap = spec.learning_rate_max_factor
    bounded: float = min(cap, max(1 / cap, factor))
    return spec.learning_rate * bounded

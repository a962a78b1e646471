"""Sorts a Keras model's variables into trained, frozen and state, with their positions; memory that
TensorFlow shares with NumPy.

Only `FlatModel` uses it. Shape suffixes: D flat trained variables, S flat floating-point state
(moving statistics).
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import ContractError, ProgramError
from dlion_core.policies.interface import Flat, Layout
from dlion_worker.training.framework import tf

_ALIGNMENT_BYTES = 64  # TensorFlow copies memory with a smaller alignment
_SEED_STATE = "seed_generator_state"
"""Suffix of the path of Keras' random generator state (dropout and similar)."""


class ModelVariables:
    """One model's variables, in the order of `stateless_call`.

    Raises: ProgramError where a pattern matches nothing, or nothing is left to train.
    """

    def __init__(self, model: Any, freeze: Sequence[str]) -> None:
        self._trainable: list[Any] = list(model.trainable_variables)
        self._state: list[Any] = list(model.non_trainable_variables)
        frozen = _frozen_paths([v.path for v in self._trainable + self._state], freeze)
        self._is_trained = [v.path not in frozen for v in self._trainable]
        trained = [v for v, yes in zip(self._trainable, self._is_trained, strict=True) if yes]
        self.trained = trained
        """The trained variables, in the layout's order."""
        if not trained:
            raise ProgramError(
                "the model has no variable left to train. Freeze fewer variables "
                f"(given: {', '.join(freeze) or 'none'})"
            )
        self.layout = Layout(
            names=tuple(v.path for v in trained),
            sizes=tuple(int(np.prod(v.shape, dtype=np.int64)) for v in trained),
        )
        self._shapes = [tuple(v.shape) for v in trained]
        self._is_frozen = [v.path in frozen for v in self._state]
        is_float = [str(v.dtype).startswith(("float", "bfloat")) for v in self._state]
        free = [i for i, is_frozen in enumerate(self._is_frozen) if not is_frozen]
        self._averaged = [i for i in free if is_float[i]]
        self._counting = [i for i in free if not is_float[i]]

    # ---- inside the compiled step

    def assemble(self, weights_D: Any, fixed: Sequence[Any]) -> list[Any]:
        """Tensors of all trainable variables: slices of the flat vector and the frozen ones."""
        pieces = tf.split(weights_D, list(self.layout.sizes)) if self._shapes else []
        trained = iter(tf.reshape(p, s) for p, s in zip(pieces, self._shapes, strict=True))
        frozen = iter(fixed)
        return [next(trained) if yes else next(frozen) for yes in self._is_trained]

    def hold_frozen(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """The new state, with frozen variables unchanged."""
        return [b if h else a for h, b, a in zip(self._is_frozen, before, after, strict=True)]

    # ---- values

    @property
    def traces(self) -> list[str]:
        """Paths of the state that is neither frozen nor random: what training may leave there."""
        pairs = zip(self._state, self._is_frozen, strict=True)
        return [each.path for each, frozen in pairs if not (frozen or _is_random(each))]

    def read_weights(self, out_D: Flat) -> None:
        """Copy the Keras variables' values into the flat vector."""
        for part, variable in zip(self.layout.slices(), self.trained, strict=True):
            out_D[part] = np.asarray(variable.value).ravel()

    def read_fixed(self) -> list[Any]:
        """Tensors of the frozen variables."""
        pairs = zip(self._trainable, self._is_trained, strict=True)
        return [tf.identity(v.value) for v, yes in pairs if not yes]

    def read_state(self) -> list[Any]:
        """Tensors of all non-trainable variables."""
        return [tf.identity(v.value) for v in self._state]

    def write(self, weights_D: Flat, state: Sequence[Any]) -> None:
        """Copy flat weights and state back into the Keras variables, to save them."""
        for part, variable in zip(self.layout.slices(), self.trained, strict=True):
            variable.assign(weights_D[part].reshape(variable.shape))
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)

    def hold(self, weights_D: Flat, fixed: Sequence[Any], state: Sequence[Any]) -> bool:
        """Whether the Keras variables have these values."""
        parts = [weights_D[part] for part in self.layout.slices()]
        pairs = zip(self._trainable, self._is_trained, strict=True)
        frozen = [variable for variable, is_trained in pairs if not is_trained]
        variables = [*self.trained, *frozen, *self._state]
        held = (np.asarray(variable.value) for variable in variables)
        return all(
            one.tobytes() == np.asarray(other).astype(one.dtype).tobytes()  # NaN equals NaN
            for one, other in zip(held, [*parts, *fixed, *state], strict=True)
        )

    def seeded(self, state: Sequence[Any], seed: int, rank: int) -> list[Any]:
        """The state with every random generator set from (seed, rank, position)."""
        result = list(state)
        for i, variable in enumerate(self._state):
            if _is_random(variable):
                seed_state = np.random.SeedSequence([seed, rank, i]).generate_state(2)
                result[i] = tf.constant(seed_state.astype(variable.dtype))
        return result

    def flat_state(self, state: Sequence[Any]) -> Flat:
        """Floating-point state as one vector [S], averaged like weights."""
        parts = [np.asarray(state[i], np.float32).ravel() for i in self._averaged]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def flat_counters(self, state: Sequence[Any]) -> NDArray[np.int64]:
        """Random generators and counts as one vector; never averaged."""
        parts = [np.asarray(state[i], np.int64).ravel() for i in self._counting]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def with_state(self, state: Sequence[Any], state_S: Flat) -> list[Any]:
        """The state with its floating-point part replaced."""
        return _replaced(state, self._averaged, state_S, "state")

    def with_counters(self, state: Sequence[Any], counters: NDArray[np.int64]) -> list[Any]:
        """The state with the rest replaced."""
        return _replaced(state, self._counting, counters, "counters")


def _is_random(variable: Any) -> bool:
    is_integer = str(variable.dtype).startswith(("int", "uint"))
    return is_integer and bool(variable.path.endswith(_SEED_STATE))


def _frozen_paths(paths: Sequence[str], patterns: Sequence[str]) -> frozenset[str]:
    frozen: set[str] = set()
    for pattern in patterns:
        matched = [p for p in paths if fnmatchcase(p, pattern)]
        if not matched:
            known = ", ".join(p for p in paths if not p.endswith(_SEED_STATE))
            raise ProgramError(
                f"trainer.freeze: no variable matches (given: {pattern}; variables: {known}). "
                "Patterns are as in a shell: conv*/kernel"
            )
        frozen.update(matched)
    return frozenset(p for p in frozen if not p.endswith(_SEED_STATE))


def _replaced(
    state: Sequence[Any], indices: Sequence[int], flat: NDArray[Any], what: str
) -> list[Any]:
    sizes = [int(np.prod(state[i].shape, dtype=np.int64)) for i in indices]
    if flat.shape != (sum(sizes),):
        raise ContractError(
            f"model {what}: wrong length (given: {list(flat.shape)}; allowed: [{sum(sizes)}]). "
            "It belongs to another model"
        )
    result = list(state)
    ends = np.cumsum(sizes, dtype=np.int64)
    for i, size, end in zip(indices, sizes, ends, strict=True):
        part = flat[end - size : end]
        values = part.astype(state[i].dtype.as_numpy_dtype)
        result[i] = tf.constant(values.reshape(state[i].shape))
    return result


def aligned_zeros(size: int) -> Flat:
    """Zeros [size] in memory that TensorFlow uses without a copy."""
    raw = np.zeros(4 * size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + 4 * size].view(np.float32)


def all_finite(values_D: Flat) -> bool:
    """Whether no entry is NaN or infinite; usually one pass without a temporary."""
    # A sum of squares is finite if all entries are, unless it overflows; then check each entry.
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(values_D, values_D))
    return math.isfinite(square) or bool(np.isfinite(values_D).all())


def tensor_view(weights_D: Flat) -> Any:
    """A tensor on the array's memory: it always has the array's current values."""
    return tf.experimental.dlpack.from_dlpack(weights_D.__dlpack__())


def check_length(weights_D: Flat, layout: Layout) -> None:
    """Raises: ContractError where the length differs."""
    if weights_D.shape != (layout.size,):
        raise ContractError(
            f"weights: wrong length (given: {list(weights_D.shape)}; allowed: [{layout.size}]). "
            "They belong to another model"
        )

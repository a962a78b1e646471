"""Values of a policy's state, as a checkpoint returns them. Keys are a prefix and a rank."""

from collections.abc import Mapping

import numpy as np

from dlion_api.names import Rank
from dlion_core.policies.interface import Flat, Value


def by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, Value]:
    """Return the values of the state keys with that prefix and a rank."""
    return {
        Rank(int(name.removeprefix(prefix))): value
        for name, value in state.items()
        if name.startswith(prefix)
    }


def ints_by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, int]:
    """Return the integers of the state keys with that prefix and a rank."""
    return {rank: int(value) for rank, value in by_rank(state, prefix).items()}


def vectors_by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, Flat]:
    return {rank: vector_from_state(value) for rank, value in by_rank(state, prefix).items()}


def vector_or_none(state: Mapping[str, Value], name: str) -> Flat | None:
    """Return the vector of that name, as a copy; None: there is none."""
    return vector_from_state(state[name]) if name in state else None


def vector_from_state(value: Value) -> Flat:
    return np.array(value, np.float32)

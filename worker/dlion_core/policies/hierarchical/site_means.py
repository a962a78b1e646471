"""Arithmetic and encoding of `hierarchical`: groups, entries to send, combination of sites' means.

The gradient of an iteration is the sample-weighted mean of all sites' means, or a robust mean per
entry that a single site cannot dominate. If only the largest entries of a gradient or mean are
sent, the rest is added to the next one (error feedback). Independent of messages.

Source of the robust means: Yin et al., "Byzantine-robust distributed learning", ICML 2018
(coordinate-wise median and trimmed mean; there over workers, here over sites).

Shape suffixes: S sites that take part in an iteration, D entries.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import GradientPart, ValueCodec, encode_whole
from dlion_core.policies.aggregation import Contribution, sample_mean
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import (
    EncodedEntries,
    Residual,
    encode_nonzero,
    largest_indices,
)
from dlion_core.policies.interface import Flat, Value
from dlion_core.policies.parameters import HierarchicalParameters
from dlion_core.policies.robust.trimmed_mean import MAX_SUM, trimmed_mean
from dlion_core.policies.state_values import vector_from_state


def groups_of(
    ranks: Collection[Rank], sites: Mapping[Rank, str], most: int
) -> tuple[tuple[Rank, ...], ...]:
    """Return groups of workers that exchange directly: a site, or at most `most` of it (0: all).

    >>> groups_of([0, 1, 2, 3], {0: "b", 1: "b", 2: "b", 3: "a"}, 2)
    ((3,), (0, 1), (2,))
    """
    groups: list[tuple[Rank, ...]] = []
    for site in sorted({sites.get(rank, "") for rank in ranks}):
        members = sorted(rank for rank in ranks if sites.get(rank, "") == site)
        step = most or len(members)
        groups += [tuple(members[at : at + step]) for at in range(0, len(members), step)]
    return tuple(groups)


class SiteCoder:
    """Encoder of one worker."""

    def __init__(self, context: PolicyContext, parameters: HierarchicalParameters) -> None:
        self._parameters = parameters
        self._size = context.layout.size
        self._codec = context.coding
        # every gateway encodes the result with the same rounding
        self._result_codec = replace(self._codec, seed=context.spec.trainer.seed)
        names = ("gradient_rest", "mean_rest")
        self._rests = {name: Residual.zeros(self._size) for name in names}

    def gradient(self, gradient_D: Flat) -> EncodedEntries:
        share = self._parameters.inside_share
        if share >= 1 and self._codec.values is ValueCodec.FLOAT32:
            whole = GradientPart(gradient_D.copy())
            return EncodedEntries(encode_whole(gradient_D, self._codec), whole)
        rest = self._rests["gradient_rest"]
        rest.value_D += gradient_D
        count = max(1, round(share * self._size))
        where = largest_indices(rest.value_D, count) if share < 1 else slice(None)
        return rest.send(where, self._codec)

    def mean(self, mean_D: Flat, iteration: int) -> EncodedEntries:
        share, in_turn = self._parameters.between_share, self._parameters.combine != "mean"
        rest = self._rests["mean_rest"]
        rest.value_D += np.clip(mean_D, -MAX_SUM, MAX_SUM)
        np.clip(rest.value_D, -MAX_SUM, MAX_SUM, out=rest.value_D)
        where = entries_to_send(rest.value_D, share, iteration, in_turn=in_turn)
        return rest.send(where, self._codec)

    def result(self, result_D: Flat) -> EncodedEntries:
        return encode_nonzero(result_D, self._result_codec)

    def state(self) -> dict[str, Value]:
        rests = {f"{name}_D": rest.value_D for name, rest in self._rests.items()}
        return {name: value_D.copy() for name, value_D in rests.items() if value_D.any()}

    def restore(self, state: Mapping[str, Value]) -> None:
        for name, rest in self._rests.items():
            if f"{name}_D" in state:
                rest.value_D = vector_from_state(state[f"{name}_D"])


def entries_to_send(
    value_D: Flat, share: float, iteration: int, *, in_turn: bool
) -> NDArray[np.intp] | slice:
    """Return the entries of a site's accumulated mean to send in that iteration.

    These are the largest. With `in_turn` they are a part that rotates, the same at every site,
    because a median needs every site's value of an entry.

    >>> entries_to_send(np.zeros(10, np.float32), 0.3, 5, in_turn=True)
    slice(2, 5, None)
    """
    size = value_D.size
    if share >= 1:
        return slice(0, size)
    if not in_turn:
        return largest_indices(value_D, max(1, round(share * size)))
    parts = min(size, math.ceil(1 / share))
    turn = iteration % parts
    return slice(turn * size // parts, (turn + 1) * size // parts)


def combine(shares: Sequence[Contribution], size: int, trim: int | None) -> Flat:
    """Return one gradient from the sites' means, in the given order.

    `trim` None: their sample-weighted mean. Otherwise sites count equally, and that many of the
    largest and smallest values of each entry are left out. At least one or two values remain.
    """
    if trim is None:
        return np.clip(sample_mean(shares, size), -MAX_SUM, MAX_SUM)
    return trimmed_mean([dense(share, size) for share in shares], size, trim)


def dense(share: Contribution, size: int) -> Flat:
    """Return its mean gradient, with zeros where nothing was sent."""
    if share.part is None:
        return np.zeros(size, np.float32)
    return share.part.weighted(np.float32(1))

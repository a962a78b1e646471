"""Encoding and error feedback of `hierarchical`: gradients, means, results.

If only the largest entries of a gradient or mean are sent, the rest is added to the next one (error
feedback). Independent of messages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dlion_core.codecs import GradientPart, ValueCodec, encode_whole
from dlion_core.policies.gradient.entries import (
    EncodedEntries,
    Residual,
    encode_nonzero,
    largest_indices,
)
from dlion_core.policies.hierarchical.site_means import accumulate, entries_to_send
from dlion_core.policies.state_values import vector_from_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_core.policies.factory import PolicyContext
    from dlion_core.policies.interface import Flat, Value
    from dlion_core.policies.parameters import HierarchicalParameters


class SiteCoder:
    """Encoder of one worker."""

    def __init__(self, context: PolicyContext, parameters: HierarchicalParameters) -> None:
        self._parameters = parameters
        self._size = context.layout.size
        self._codec = context.coding
        # every gateway encodes the result with the same rounding
        self._result_codec = replace(self._codec, seed=context.spec.trainer.seed)
        self._rests = {
            "gradient_rest": Residual.zeros(self._size),
            "mean_rest": Residual.zeros(self._size),
        }

    def gradient(self, gradient_D: Flat) -> EncodedEntries:
        share = self._parameters.inside_share
        if share >= 1 and self._codec.values is ValueCodec.FLOAT32:
            return EncodedEntries(
                encode_whole(gradient_D, self._codec), GradientPart(gradient_D.copy())
            )
        rest = self._rests["gradient_rest"]
        rest.value_D += gradient_D
        count = max(1, round(share * self._size))
        where = largest_indices(rest.value_D, count) if share < 1 else slice(None)
        return rest.send(where, self._codec)

    def mean(self, mean_D: Flat, iteration: int) -> EncodedEntries:
        share, in_turn = self._parameters.between_share, self._parameters.combine != "mean"
        rest = self._rests["mean_rest"]
        accumulate(rest.value_D, mean_D)
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

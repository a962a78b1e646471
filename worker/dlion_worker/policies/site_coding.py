"""What a worker of `hierarchical` codes, and what it keeps back: gradients, means, results.

A gradient or mean of which only the largest entries travel leaves a rest, which is added to the
next one (error feedback). Called by `hierarchical`; nothing is known here of messages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dlion_worker.codecs import GradientPart, ValueCodec, encode_whole
from dlion_worker.policies.entries import Coded, Residual, code, largest
from dlion_worker.policies.peer_machine import flat
from dlion_worker.policies.site_means import entries_to_send, gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import Flat, Value
    from dlion_worker.policies.parameters import HierarchicalParameters


class SiteCoder:
    """One worker's."""

    def __init__(self, context: Context, parameters: HierarchicalParameters) -> None:
        self._parameters = parameters
        self._size = context.layout.size
        self._codec = context.coding
        # each gateway codes the result: its rounding is to be the same
        self._result_codec = replace(self._codec, seed=context.spec.trainer.seed)
        self._rests = {"gradient_rest": Residual(self._size), "mean_rest": Residual(self._size)}

    def gradient(self, gradient_D: Flat) -> Coded:
        """The own gradient, for the site's gateway."""
        share = self._parameters.inside_share
        if share >= 1 and self._codec.values is ValueCodec.FLOAT32:
            return Coded(encode_whole(gradient_D, self._codec), GradientPart(gradient_D.copy()))
        rest = self._rests["gradient_rest"]
        rest.value_D += gradient_D
        count = max(1, round(share * self._size))
        where = largest(rest.value_D, count) if share < 1 else slice(None)
        return rest.send(where, self._codec)

    def mean(self, mean_D: Flat, iteration: int) -> Coded:
        """The site's mean of that iteration, for the other sites."""
        share, in_turn = self._parameters.between_share, self._parameters.combine != "mean"
        rest = self._rests["mean_rest"]
        gather(rest.value_D, mean_D)
        where = entries_to_send(rest.value_D, share, iteration, in_turn=in_turn)
        return rest.send(where, self._codec)

    def result(self, result_D: Flat) -> Coded:
        """The one gradient of an iteration."""
        return code(result_D, self._result_codec)

    def state(self) -> dict[str, Value]:
        """What has not been sent yet."""
        rests = {f"{name}_D": rest.value_D for name, rest in self._rests.items()}
        return {name: value_D.copy() for name, value_D in rests.items() if value_D.any()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        for name, rest in self._rests.items():
            if f"{name}_D" in state:
                rest.value_D = flat(state[f"{name}_D"])

"""Policy `async`: whole gradients applied on arrival, optionally with delay compensation.

Receivers apply each gradient as a separate update (`delayed_gradients`). If lambda is above 0, the
gradient is first corrected for the weight change since its sender read the weights. The diagonal of
the gradient's outer product replaces the Hessian:

    g + lambda * g * g * (w_now - w_then)

w_then is a copy of the local weights per peer, taken when it read them. The state contains the
staleness of gradients in updates as `staleness_count`, `staleness_sum` and `staleness_max`.

Source: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017
(constant lambda; without the variant that follows a running mean square). Ours: peer to peer.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, decode_gradient, encode_whole
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.delayed_gradients import DelayedGradientMachine, StalenessRule
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
from dlion_core.policies.interface import BudgetsChanged, Flat, PolicyMachine, ReplicaView, Value
from dlion_core.policies.parameters import AsyncParameters
from dlion_core.policies.state_values import vectors_by_rank

_READ_BY = "weights_read_by_"
"""Prefix of checkpoint keys, followed by a rank: the weights that this peer read."""


def asynchronous(context: PolicyContext, parameters: AsyncParameters) -> PolicyMachine:
    compensation = DelayCompensation(context.coding, parameters.compensation, context.replica)
    share = parameters.step == "share"
    return DelayedGradientMachine(
        context, compensation, bound=parameters.bound, server=parameters.server, share=share
    )


class DelayCompensation(StalenessRule):
    """Sends everything; compensates delayed gradients if lambda is above 0."""

    def __init__(self, codec: AnyCoding, lambda_: float, replica: ReplicaView | None) -> None:
        if lambda_ and replica is None:
            raise ValueError("delay compensation without the weights")
        self._codec, self._lambda = codec, np.float32(lambda_)
        self._replica = replica if lambda_ else None
        self._then_D: dict[Rank, Flat] = {}

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],
        links: BudgetsChanged,  # noqa: ARG002 - the Protocol's
    ) -> OutgoingPayloads:
        """Return all entries; the part that counts locally is what the peers decode."""
        payload = encode_whole(gradient_D, self._codec)
        own = decode_gradient(payload, gradient_D.size)
        return OutgoingPayloads(dict.fromkeys(peers, payload), own)

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:  # noqa: ARG002
        """Add lambda g g (w_now - w_then)."""
        then_D = self._then_D.get(sender)
        if self._replica is not None and then_D is not None:
            moved_D = self._replica.weights_D - then_D
            gradient_D += self._lambda * gradient_D * gradient_D * moved_D

    def read(self, reader: Rank) -> None:
        if self._replica is not None:
            self._then_D[reader] = self._replica.weights_D.copy()

    def forget(self, reader: Rank) -> None:
        self._then_D.pop(reader, None)

    def state(self) -> dict[str, Value]:
        return {f"{_READ_BY}{rank}": then_D.copy() for rank, then_D in self._then_D.items()}

    def restore(self, state: Mapping[str, Value]) -> None:
        self._then_D = vectors_by_rank(state, _READ_BY)

"""Policy `async`: whole gradients, applied as they come, with delay compensation as an option.

Receivers add each arrived gradient as an update of its own (`delayed`). With lambda above 0 it is
first carried from where its sender read the weights to where they are now, by the diagonal of the
gradient's outer product in place of the Hessian:

    g + lambda * g * g * (w_now - w_then)

w_then is a copy of the weights here for each peer, taken when it read them. How old gradients were,
in updates, stands in the state as `staleness_count`, `staleness_sum` and `staleness_most`.

Source: Zheng et al., "Asynchronous stochastic gradient descent with delay compensation", ICML 2017
(constant lambda; the variant that follows a running mean square is left out). Ours: peer to peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_worker.codecs import AnyCoding, GradientPart, decode_gradient, encode_whole
from dlion_worker.policies.delayed import DelayedMachine
from dlion_worker.policies.sending import Outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import BudgetsChanged, Flat, Machine, ReplicaView, Value
    from dlion_worker.policies.parameters import AsyncParameters

_READ_BY = "weights_read_by_"
"""Before a rank, in a checkpoint: the weights which that peer read."""


def asynchronous(context: Context, parameters: AsyncParameters) -> Machine:
    """Whole gradients as they come."""
    compensation = Compensation(context.coding, parameters.compensation, context.replica)
    return DelayedMachine(
        context,
        compensation,
        bound=parameters.bound,
        server=parameters.server,
        share=parameters.step == "share",
    )


class Compensation:
    """What is sent is everything; what is old is compensated, if lambda is above 0."""

    own_as_peers = False

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
    ) -> Outgoing:
        """All entries; what counts here is what the peers decode."""
        payload = encode_whole(gradient_D, self._codec)
        own = decode_gradient(payload, gradient_D.size)
        return Outgoing(dict.fromkeys(peers, payload), own)

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:  # noqa: ARG002
        """Adds lambda g g (w_now - w_then)."""
        then_D = self._then_D.get(sender)
        if self._replica is not None and then_D is not None:
            moved_D = self._replica.weights_D - then_D
            gradient_D += self._lambda * gradient_D * gradient_D * moved_D

    def applied(self, part: GradientPart) -> None:
        """Nothing is counted."""

    def read(self, reader: Rank) -> None:
        """Keeps the weights that it has."""
        if self._replica is not None:
            self._then_D[reader] = self._replica.weights_D.copy()

    def forget(self, reader: Rank) -> None:
        """What it had read is void."""
        self._then_D.pop(reader, None)

    def state(self) -> dict[str, Value]:
        """The weights that each peer has read."""
        return {f"{_READ_BY}{rank}": then_D.copy() for rank, then_D in self._then_D.items()}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        self._then_D = {
            Rank(int(name.removeprefix(_READ_BY))): np.array(value, np.float32)
            for name, value in state.items()
            if name.startswith(_READ_BY)
        }

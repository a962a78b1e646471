"""Policy `adacomp`: the largest entries of each variable, damped by their staleness.

Of each variable the `max(1, floor(share * length))` largest magnitudes are sent. The rest is
dropped (no residual), locally as well. Entry i of a gradient is divided by sigma_i, so its step is
eta / sigma_i. This is the number of updates (at least 1) that touched entry i since the sender read
the weights. Receivers add. With a server, sigma_i is exact. Peer to peer, each worker has its own
touch counter per parameter, and `delayed_gradients` defines when a peer has read. A worker divides
its own gradients by the touches since its last one, as its peers do. Otherwise each replica would
drift towards its own data.

Source: Hardy, Le Merrer, Sericola, "Distributed deep learning on edge-devices: feasibility via
adaptive compression", NCA 2017, and the authors' code. Ours: peer to peer, momentum of the
manifest's optimizer over damped gradients, zero entries are not sent, ties to the lower index.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, require_finite
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.delayed_gradients import DelayedGradientMachine, StalenessRule
from dlion_core.policies.gradient.entries import (
    encode_nonzero,
    largest_indices,
    outgoing,
    zero_except,
)
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
from dlion_core.policies.interface import BudgetsChanged, Flat, Layout, PolicyMachine, Value
from dlion_core.policies.parameters import AdacompParameters
from dlion_core.policies.state_values import by_rank

_READ_BY = "touched_when_read_by_"
"""Prefix of checkpoint keys, followed by a rank: touch counters when that peer read."""


def adacomp(context: PolicyContext, parameters: AdacompParameters) -> PolicyMachine:
    delays = TouchCounters(context.layout, parameters.share, context.coding)
    share = parameters.step == "share"
    return DelayedGradientMachine(
        context, delays, bound=parameters.bound, server=parameters.server, share=share
    )


class TouchCounters(StalenessRule):
    """Selection of entries, and a counter per entry of the updates that touched it."""

    own_as_peers = True

    def __init__(self, layout: Layout, share: float, codec: AnyCoding) -> None:
        self._slices = layout.slices()
        self._share, self._codec = share, codec
        self._touched_D = np.zeros(layout.size, np.uint32)
        self._read_D: dict[Rank, NDArray[np.uint32]] = {}

    def prepare(
        self,
        gradient_D: Flat,
        peers: Sequence[Rank],
        links: BudgetsChanged,  # noqa: ARG002 - the Protocol's
    ) -> OutgoingPayloads:
        """Return the largest entries; nothing for a zero gradient."""
        require_finite(gradient_D, "gradient")
        kept_D = np.zeros_like(gradient_D)
        for where in self._slices:
            own_V = gradient_D[where]
            kept_D[where] = zero_except(
                own_V, largest_indices(own_V, kept_count(own_V.size, self._share))
            )
        coded = encode_nonzero(kept_D, self._codec)
        return outgoing(dict.fromkeys(peers, coded), coded.part)

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:  # noqa: ARG002
        """Divide each entry by the updates that touched it since its sender read."""
        since_D = self._touched_D
        if sender in self._read_D:
            since_D = since_D - self._read_D[sender]
        gradient_D /= np.maximum(since_D, np.uint32(1)).astype(np.float32)

    def applied(self, part: GradientPart) -> None:
        index_K = part.index_K
        if index_K is None:
            self._touched_D[part.value_K != 0] += np.uint32(1)
        else:
            self._touched_D[index_K] += np.uint32(1)

    def read(self, reader: Rank) -> None:
        """Staleness of its gradients counts from now."""
        self._read_D[reader] = self._touched_D.copy()

    def forget(self, reader: Rank) -> None:
        self._read_D.pop(reader, None)

    def state(self) -> dict[str, Value]:
        kept = {f"{_READ_BY}{rank}": read_D.copy() for rank, read_D in self._read_D.items()}
        return {"touched_D": self._touched_D.copy(), **kept}

    def restore(self, state: Mapping[str, Value]) -> None:
        self._touched_D = np.array(state["touched_D"], np.uint32)
        read_D = by_rank(state, _READ_BY)
        self._read_D = {rank: np.array(value, np.uint32) for rank, value in read_D.items()}


def kept_count(length: int, share: float) -> int:
    """Return how many entries of a variable are kept.

    >>> kept_count(250, 0.01)
    2
    """
    return max(1, int(round(share * length, 9)))

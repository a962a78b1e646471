"""Policy `adacomp`: the largest entries of each variable, damped by how often theirs were touched.

Of each variable the `max(1, floor(share * length))` largest magnitudes are sent; the rest is
dropped (no residual), here as at the receivers. Entry i of a gradient is divided by sigma_i, the
number of updates that have touched entry i here since its sender read the weights (by 1 where
there were none): a step of eta / sigma_i. Receivers add. With a server, sigma_i is exact. Peer to
peer each worker keeps a touch counter per parameter of its own, `delayed` says when a peer has
read, and a worker's own gradients are divided by the touches since its last one, as the peers
divide them: undivided, each replica leans to its own data.

Source: Hardy, Le Merrer, Sericola, "Distributed deep learning on edge-devices: feasibility via
adaptive compression", NCA 2017, and the authors' code. Ours: peer to peer, momentum of the
manifest's optimizer over damped gradients, entries of zero are not sent, ties to the lower index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_worker.codecs import AnyCoding, GradientPart, require_finite
from dlion_worker.policies.delayed import DelayedMachine
from dlion_worker.policies.entries import code, largest, only
from dlion_worker.policies.sending import Outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dlion_worker.policies.building import Context
    from dlion_worker.policies.interface import BudgetsChanged, Flat, Layout, Machine, Value
    from dlion_worker.policies.parameters import AdacompParameters

_READ_BY = "touched_when_read_by_"
"""Before a rank, in a checkpoint: the touch counter when that peer read."""


def adacomp(context: Context, parameters: AdacompParameters) -> Machine:
    """Sparse gradients as they come, each entry damped by its own staleness."""
    delays = Touches(context.layout, parameters.share, context.coding)
    return DelayedMachine(
        context,
        delays,
        bound=parameters.bound,
        server=parameters.server,
        share=parameters.step == "share",
    )


class Touches:
    """Which entries are sent, and a counter per entry of the updates that touched it."""

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
    ) -> Outgoing:
        """The largest entries; nothing where the gradient is all zeros."""
        require_finite(gradient_D, "gradient")
        kept_D = np.zeros_like(gradient_D)
        for where in self._slices:
            own_V = gradient_D[where]
            kept_D[where] = only(own_V, largest(own_V, share_of(own_V.size, self._share)))
        coded = code(kept_D, self._codec)
        if coded.payload is None:
            return Outgoing({}, coded.part)
        return Outgoing(dict.fromkeys(peers, coded.payload), coded.part)

    def correct(self, gradient_D: Flat, part: GradientPart, sender: Rank) -> None:  # noqa: ARG002
        """Divides each entry by the updates that touched it since its sender read."""
        since_D = self._touched_D
        if sender in self._read_D:
            since_D = since_D - self._read_D[sender]
        gradient_D /= np.maximum(since_D, np.uint32(1)).astype(np.float32)

    def applied(self, part: GradientPart) -> None:
        """Counts one touch more for each of these entries."""
        index_K = part.index_K
        if index_K is None:
            self._touched_D[part.value_K != 0] += np.uint32(1)
        else:
            self._touched_D[index_K] += np.uint32(1)

    def read(self, reader: Rank) -> None:
        """Its gradients' staleness counts from here."""
        self._read_D[reader] = self._touched_D.copy()

    def forget(self, reader: Rank) -> None:
        """What it had read is void."""
        self._read_D.pop(reader, None)

    def state(self) -> dict[str, Value]:
        """The counter, and what it was when each peer read."""
        kept = {f"{_READ_BY}{rank}": read_D.copy() for rank, read_D in self._read_D.items()}
        return {"touched_D": self._touched_D.copy(), **kept}

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        self._touched_D = np.array(state["touched_D"], np.uint32)
        self._read_D = {
            Rank(int(name.removeprefix(_READ_BY))): np.array(value, np.uint32)
            for name, value in state.items()
            if name.startswith(_READ_BY)
        }


def share_of(length: int, share: float) -> int:
    """How many entries of a variable are kept.

    >>> share_of(250, 0.01)
    2
    """
    return max(1, int(round(share * length, 9)))

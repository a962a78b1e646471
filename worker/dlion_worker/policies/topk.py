"""Policy `topk`: the largest entries of the whole gradient, with or without error feedback.

On each link goes a fixed share of the entries (the same to all), or, with `share: 0`, as many as
that link's budget carries. Entries compete over the whole vector by |g|; of equal ones the first
win. Receivers add what comes, under the manifest's weighting. An entry kept for later counts by
the local batch of the iteration that sends it.

| `residual` | kept | what counts here |
|---|---|---|
| `none` | nothing | what is sent, with a fixed share; by budgets: the whole gradient |
| `shared` | one residual; all links carry the same, as many as the narrowest takes | what is sent |
| `perLink` | a residual of its own for each link (D floats each) | the whole gradient |

What counts here is what all peers get too, wherever all get the same: under full synchronous
exchange those replicas stay identical. Where links carry different entries nothing could be the
same for all, so a worker takes its own gradient whole and at once. A worker without peers takes
all that it has. A peer that leaves takes its link's residual with it.

Source: Aji & Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Stich et
al., Sparsified SGD with memory, NeurIPS 2018. Budgets and the residual for each link are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dlion_api.names import Rank
from dlion_worker.codecs import AnyCoding, GradientPart, kept_that_fit, require_finite
from dlion_worker.policies.building import Context, gradient_machine
from dlion_worker.policies.entries import Coded, Residual, code, largest, only
from dlion_worker.policies.sending import Outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_worker.policies.interface import Flat, Machine, Value
    from dlion_worker.policies.parameters import TopKParameters

_SHARED = "topk_residual_D"
_PER_LINK = "topk_residual_D_of_"


def topk(context: Context, parameters: TopKParameters) -> Machine:
    """The largest entries to every peer, with error feedback as the parameters say."""
    sending = TopK(context.layout.size, context.coding, parameters.share, parameters.residual)
    return gradient_machine(context, sending)


class TopK:
    """What of each gradient goes on each link, and what stays."""

    combines = True

    def __init__(self, size: int, codec: AnyCoding, share: float, residual: str) -> None:
        self._size = size
        self._codec = codec
        self._share = share
        self._mode = residual
        self._shared = Residual(size)
        self._by_link: dict[Rank, Residual] = {}

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> Outgoing:
        """A payload for each link that has something to carry.

        Raises:
            ValueError: an entry is not finite.
        """
        require_finite(gradient_D, "gradient")
        count = {peer: self._count(budget_bytes.get(peer)) for peer in peers}
        if self._mode == "perLink":
            coded = {peer: self._from_link(peer, gradient_D, count[peer]) for peer in peers}
            return _outgoing(coded, GradientPart(gradient_D))
        if self._mode == "shared":
            return self._from_shared(gradient_D, count)
        return self._memoryless(gradient_D, count)

    def _count(self, budget_bytes: int | None) -> int:
        """The most entries that go on a link."""
        if self._share:
            return max(1, int(self._share * self._size))
        if budget_bytes is None:
            return self._size
        return kept_that_fit(budget_bytes, self._size, self._codec)

    def _memoryless(self, gradient_D: Flat, count: Mapping[Rank, int]) -> Outgoing:
        by_count = {
            kept: code(only(gradient_D, largest(gradient_D, kept)), self._codec)
            for kept in set(count.values())
        }
        whole = GradientPart(gradient_D)
        own = next(iter(by_count.values())).part if self._share and count else whole
        return _outgoing({peer: by_count[kept] for peer, kept in count.items()}, own)

    def _from_shared(self, gradient_D: Flat, count: Mapping[Rank, int]) -> Outgoing:
        self._shared.value_D += gradient_D
        if not count:
            return Outgoing({}, GradientPart(self._shared.take()))
        kept = largest(self._shared.value_D, min(count.values()))
        coded = self._shared.send(kept, self._codec)
        return _outgoing(dict.fromkeys(count, coded), coded.part)

    def _from_link(self, peer: Rank, gradient_D: Flat, count: int) -> Coded:
        residual = self._by_link.setdefault(peer, Residual(self._size))
        residual.value_D += gradient_D
        return residual.send(largest(residual.value_D, count), self._codec)

    def forget(self, peer: Rank) -> None:
        """What was kept for its link alone is void."""
        self._by_link.pop(peer, None)

    def state(self) -> dict[str, Value]:
        """The residuals."""
        state: dict[str, Value] = {
            f"{_PER_LINK}{peer}": residual.value_D.copy()
            for peer, residual in self._by_link.items()
        }
        if self._mode == "shared":
            state[_SHARED] = self._shared.value_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        if _SHARED in state:
            self._shared.value_D = np.array(state[_SHARED], np.float32)
        self._by_link = {}
        for name, value_D in state.items():
            if name.startswith(_PER_LINK):
                residual = self._by_link[Rank(int(name.removeprefix(_PER_LINK)))] = Residual(0)
                residual.value_D = np.array(value_D, np.float32)


def _outgoing(coded: Mapping[Rank, Coded], own: GradientPart) -> Outgoing:
    payloads = {peer: one.payload for peer, one in coded.items() if one.payload is not None}
    return Outgoing(payloads, own)

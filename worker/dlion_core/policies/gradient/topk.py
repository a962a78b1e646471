"""Policy `topk`: the largest entries of the whole gradient, with or without error feedback.

Each link carries a fixed share of the entries (the same for all), or with `share: 0` as many as its
budget allows. Entries compete over the whole vector by |g|; ties go to the lower index. Receivers
add them under the manifest's weighting. A delayed entry is weighted by the local batch of the
iteration that sends it.

| `residual` | kept | applied locally |
|---|---|---|
| `none` | nothing | what is sent, with a fixed share; by budgets: the whole gradient |
| `shared` | one residual; all links carry the same, as many as the narrowest takes | what is sent |
| `perLink` | a residual per link (D floats each) | the whole gradient |

If all peers get the same entries, this worker applies the same too, so replicas stay identical
under full synchronous exchange. If links carry different entries, no choice is equal for all, so it
applies its whole gradient at once. A worker without peers applies its whole residual. If a peer
leaves, its link's residual is dropped.

Source: Aji & Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Stich et
al., Sparsified SGD with memory, NeurIPS 2018. Budgets and the residual per link are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, max_kept_entries, require_finite
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.entries import (
    EncodedEntries,
    Residual,
    encode_nonzero,
    largest_indices,
    outgoing,
    zero_except,
)
from dlion_core.policies.gradient.gradient_selectors import GradientSelector, OutgoingPayloads
from dlion_core.policies.interface import Flat, PolicyMachine, Value
from dlion_core.policies.parameters import TopKParameters
from dlion_core.policies.state_values import vector_from_state, vectors_by_rank

_SHARED = "topk_residual_D"
_PER_LINK = "topk_residual_D_of_"


def topk(context: PolicyContext, parameters: TopKParameters) -> PolicyMachine:
    selector = TopK(context.layout.size, context.coding, parameters.share, parameters.residual)
    return gradient_machine(context, selector)


class TopK(GradientSelector):
    """Selection per link, and the residuals."""

    def __init__(self, size: int, codec: AnyCoding, share: float, residual: str) -> None:
        self._size = size
        self._codec = codec
        self._share = share
        self._mode = residual
        self._shared = Residual.zeros(size)
        self._by_link: dict[Rank, Residual] = {}

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return a payload for each link that has entries to carry."""
        require_finite(gradient_D, "gradient")
        count = {peer: self._count(budget_bytes.get(peer)) for peer in peers}
        if self._mode == "perLink":
            coded = {peer: self._from_link(peer, gradient_D, count[peer]) for peer in peers}
            return outgoing(coded, GradientPart(gradient_D))
        if self._mode == "shared":
            return self._from_shared(gradient_D, count)
        return self._memoryless(gradient_D, count)

    def _count(self, budget_bytes: int | None) -> int:
        if self._share:
            return max(1, int(self._share * self._size))
        if budget_bytes is None:
            return self._size
        return max_kept_entries(budget_bytes, self._size, self._codec)

    def _memoryless(self, gradient_D: Flat, count: Mapping[Rank, int]) -> OutgoingPayloads:
        by_count = {
            kept: encode_nonzero(
                zero_except(gradient_D, largest_indices(gradient_D, kept)), self._codec
            )
            for kept in set(count.values())
        }
        whole = GradientPart(gradient_D)
        own = next(iter(by_count.values())).part if self._share and count else whole
        return outgoing({peer: by_count[kept] for peer, kept in count.items()}, own)

    def _from_shared(self, gradient_D: Flat, count: Mapping[Rank, int]) -> OutgoingPayloads:
        self._shared.value_D += gradient_D
        if not count:
            return OutgoingPayloads({}, GradientPart(self._shared.take()))
        kept = largest_indices(self._shared.value_D, min(count.values()))
        coded = self._shared.send(kept, self._codec)
        return outgoing(dict.fromkeys(count, coded), coded.part)

    def _from_link(self, peer: Rank, gradient_D: Flat, count: int) -> EncodedEntries:
        residual = self._by_link.setdefault(peer, Residual.zeros(self._size))
        residual.value_D += gradient_D
        return residual.send(largest_indices(residual.value_D, count), self._codec)

    def forget(self, peer: Rank) -> None:
        self._by_link.pop(peer, None)

    def state(self) -> dict[str, Value]:
        state: dict[str, Value] = {
            f"{_PER_LINK}{peer}": residual.value_D.copy()
            for peer, residual in self._by_link.items()
        }
        if self._mode == "shared":
            state[_SHARED] = self._shared.value_D.copy()
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        if _SHARED in state:
            self._shared = Residual(vector_from_state(state[_SHARED]))
        kept = vectors_by_rank(state, _PER_LINK)
        self._by_link = {peer: Residual(value_D) for peer, value_D in kept.items()}

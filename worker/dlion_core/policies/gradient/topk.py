"""Policy `topk`: the largest entries of the whole gradient, with or without error feedback.

Each link carries a fixed share of the entries (the same for all), or with `share: 0` as many as its
budget allows. Entries compete over the whole vector by |g|; ties go to the lower index. Receivers
add them under the manifest's weighting.

| `residual` | kept | applied locally |
|---|---|---|
| `none` | nothing | what is sent, with a fixed share; by budgets: the whole gradient |
| `shared` | one residual; all links carry the same, as many as the narrowest takes | what is sent |
| `perLink` | a residual per link (D floats each) | the whole gradient |

`entries.ResidualSelector` has the residuals, and why what is applied differs.

Source: Aji & Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Stich et
al., Sparsified SGD with memory, NeurIPS 2018. Budgets and the residual per link are ours.
"""

from collections.abc import Mapping, Sequence

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, max_kept_entries, require_finite
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.gradient.entries import (
    EncodedEntries,
    Residual,
    ResidualSelector,
    encode_nonzero,
    largest_indices,
    outgoing,
    zero_except,
)
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads
from dlion_core.policies.interface import Flat, PolicyMachine, Value
from dlion_core.policies.parameters import TopKParameters


def topk(context: PolicyContext, parameters: TopKParameters) -> PolicyMachine:
    selector = TopK(context.layout.size, context.coding, parameters.share, parameters.residual)
    return gradient_machine(context, selector)


class TopK(ResidualSelector):
    """Selection per link, from its residual or from the gradient alone."""

    def __init__(self, size: int, codec: AnyCoding, share: float, residual: str) -> None:
        super().__init__(size, "topk_residual_D", per_link=residual == "perLink")
        self._codec, self._share, self._keeps = codec, share, residual != "none"

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        if self._keeps:
            return super().prepare(gradient_D, peers, budget_bytes)
        require_finite(gradient_D, "gradient")
        count = {peer: self._count(budget_bytes.get(peer)) for peer in peers}
        by_count = {
            kept: encode_nonzero(
                zero_except(gradient_D, largest_indices(gradient_D, kept)), self._codec
            )
            for kept in set(count.values())
        }
        whole = GradientPart(gradient_D)
        own = next(iter(by_count.values())).part if self._share and count else whole
        return outgoing({peer: by_count[kept] for peer, kept in count.items()}, own)

    def send(self, residual: Residual, link: Rank, budget_bytes: int | None) -> EncodedEntries:  # noqa: ARG002
        where = largest_indices(residual.value_D, self._count(budget_bytes))
        return residual.send(where, self._codec)

    def _count(self, budget_bytes: int | None) -> int:
        if self._share:
            return max(1, int(self._share * self._size))
        if budget_bytes is None:
            return self._size
        return max_kept_entries(budget_bytes, self._size, self._codec)

    def state(self) -> dict[str, Value]:
        return super().state() if self._keeps else {}

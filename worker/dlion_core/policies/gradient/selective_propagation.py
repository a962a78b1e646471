"""Selective propagation for `dlion`: each step sends a gradient to a few peers only.

Called by `gradient_policies` if the manifest sets `exchange.propagation: selective`. The *pending*
gradient of a peer is the sum of gradients since it was last served. The peer receives it as one
gradient: the largest entries under its link's budget (Max N).

A step serves the `max_peers` peers with the largest

    score = ||pending|| * min(1, budget of the link / bytes of a whole gradient),

the pending information times the fraction of it that the link carries now. Ties go in rank order
from this worker's rank on, so that workers serve different peers. No peer waits longer than
`max_wait_steps` steps (earliest deadline first). A step first serves the peers that must go now so
that all later ones meet their deadlines at `max_peers` per step. It serves more if that rate is too
low or many newcomers arrive. A link that cannot carry Max N's floor is not chosen. When due, it
gets what fits below the floor; if nothing fits, it stays due.

With residual `none`, entries that a link does not carry are lost to it. Peers served in the same
step share one pending gradient, so at most `max_wait_steps` vectors are kept (one more if a budget
delays a due peer). With `perLink` the rest stays pending: sent + pending = sum of all gradients,
with one vector per peer. This worker applies its whole local gradient at once. A pending gradient
is weighted by the local batch of the step that sends it.

Source: named by DLion's authors; the rule is ours. Earliest deadline first: Liu and Layland, 1973.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dlion_api.names import Rank
from dlion_core.codecs import AnyCoding, GradientPart, coded_bytes, decode_gradient, require_finite
from dlion_core.policies.gradient.gradient_selectors import (
    GradientSelector,
    MaxN,
    OutgoingPayloads,
    Payload,
)
from dlion_core.policies.interface import Flat, Layout, Value
from dlion_core.policies.state_values import ints_by_rank, vector_from_state

_PENDING: Final = "selective_pending_D_"
_WAITED: Final = "selective_waited_"
_NO_FLOOR: Final = 0.0


@dataclass(eq=False)
class _Pending:
    """A pending gradient that is the same for some peers."""

    gradient_D: Flat
    peers: set[Rank]


class SelectiveMaxN(GradientSelector):
    """One worker's choice of peers, and the pending gradient of each."""

    def __init__(
        self,
        layout: Layout,
        codec: AnyCoding,
        floor_percent: float | None,
        *,
        own: Rank,
        max_peers: int,
        max_wait_steps: int,
        keeps_rest: bool,
    ) -> None:
        """`floor_percent` None: whole gradients, regardless of budgets."""
        self._size, self._is_whole = layout.size, floor_percent is None
        self._whole_bytes = coded_bytes(layout.size, layout.size, codec)
        self._max_n = MaxN(layout, codec, floor_percent or _NO_FLOOR)
        self._due_max_n = MaxN(layout, codec, _NO_FLOOR)
        self._own, self._max_peers, self._max_wait_steps = own, max_peers, max_wait_steps
        self._keeps_rest = keeps_rest
        self._pending: list[_Pending] = []
        self._waited: dict[Rank, int] = {}
        """Steps since each peer was served, including the current one."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Return payloads for the peers to serve in this step."""
        require_finite(gradient_D, "gradient")
        self._take_in(gradient_D, peers)
        budgets = {} if self._is_whole else budget_bytes
        due = self._must_go(peers)
        served = {peer: self._payload(peer, budgets, is_due=True) for peer in due}
        payloads = {peer: payload for peer, payload in served.items() if payload is not None}
        wanted = self._max_peers - len(payloads)
        for peer in self._by_score([p for p in peers if p not in due], budgets):
            if wanted <= 0:
                break
            one = self._payload(peer, budgets, is_due=False)
            if one is not None:
                payloads[peer], wanted = one, wanted - 1
        self._settle(payloads)
        return OutgoingPayloads(payloads, GradientPart(gradient_D))

    # ---- choice of peers -------------------------------------------------------------------------

    def _must_go(self, peers: Sequence[Rank]) -> list[Rank]:
        """Smallest set, longest waiting first, so that all others can still be served in time."""
        oldest = sorted(peers, key=lambda peer: (-self._waited[peer], self._turn(peer)))
        fewest = 0
        # per step, these suffice to serve all of them in time
        per_step = max(self._max_peers, -(-len(oldest) // self._max_wait_steps))
        for at, peer in enumerate(oldest):
            steps_left = max(0, self._max_wait_steps - self._waited[peer])
            fewest = max(fewest, at + 1 - per_step * steps_left)
        return oldest[:fewest]

    def _by_score(self, peers: list[Rank], budgets: Mapping[Rank, int]) -> list[Rank]:
        norms: dict[Rank, float] = {}
        for pending in self._pending:
            if not pending.peers.isdisjoint(peers):
                square_D = np.square(pending.gradient_D, dtype=np.float64)
                # not BLAS: its result depends on the number of cores
                norm = float(np.sqrt(square_D.sum()))
                norms.update(dict.fromkeys(pending.peers, norm))

        def score(peer: Rank) -> float:
            carried = min(1.0, budgets.get(peer, self._whole_bytes) / self._whole_bytes)
            return norms[peer] * carried

        return sorted(peers, key=lambda peer: (-score(peer), self._turn(peer)))

    def _turn(self, peer: Rank) -> tuple[bool, Rank]:
        """Sort key: peers of higher rank than this worker first."""
        return (peer < self._own, peer)

    # ---- pending gradients -----------------------------------------------------------------------

    def _take_in(self, gradient_D: Flat, peers: Iterable[Rank]) -> None:
        """Add a gradient to all pending ones. A new peer lacks nothing from before."""
        for peer in set(self._waited).difference(peers):
            self.forget(peer)
        for pending in self._pending:
            pending.gradient_D += gradient_D
        new = [peer for peer in peers if peer not in self._waited]
        self._begin(gradient_D, new)
        self._waited = {peer: self._waited.get(peer, 0) + 1 for peer in peers}

    def _begin(self, gradient_D: Flat, peers: Sequence[Rank]) -> None:
        if self._keeps_rest:
            self._pending += [_Pending(gradient_D.copy(), {peer}) for peer in peers]
        elif peers:
            self._pending.append(_Pending(gradient_D.copy(), set(peers)))

    def _of(self, peer: Rank) -> _Pending:
        return next(pending for pending in self._pending if peer in pending.peers)

    def _payload(self, peer: Rank, budgets: Mapping[Rank, int], *, is_due: bool) -> Payload | None:
        """Payload for the peer; None if its link cannot carry enough."""
        pending_D = self._of(peer).gradient_D
        payload = self._max_n.prepare(pending_D, [peer], budgets).payloads.get(peer)
        if payload is None and is_due and self._waited[peer] >= self._max_wait_steps:
            payload = self._due_max_n.prepare(pending_D, [peer], budgets).payloads.get(peer)
            self._due_max_n.forget(peer)
            if payload is not None:
                self._max_n.forget(peer)
        return payload

    def _settle(self, payloads: Mapping[Rank, Payload]) -> None:
        if self._keeps_rest:
            for peer, payload in payloads.items():
                sent = decode_gradient(payload, self._size)
                sent.add_to(self._of(peer).gradient_D, np.float32(-1))
        else:
            for pending in self._pending:
                pending.peers.difference_update(payloads)
            self._pending = [pending for pending in self._pending if pending.peers]
            self._begin(np.zeros(self._size, np.float32), list(payloads))
        self._waited.update(dict.fromkeys(payloads, 0))

    # ---- members and checkpoints -----------------------------------------------------------------

    def forget(self, peer: Rank) -> None:
        self._max_n.forget(peer)
        self._waited.pop(peer, None)
        for pending in self._pending:
            pending.peers.discard(peer)
        self._pending = [pending for pending in self._pending if pending.peers]

    def state(self) -> dict[str, Value]:
        return {
            **{
                f"{_PENDING}{'_'.join(map(str, sorted(pending.peers)))}": pending.gradient_D.copy()
                for pending in self._pending
            },
            **{f"{_WAITED}{peer}": steps for peer, steps in self._waited.items()},
            **self._max_n.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        self._waited = ints_by_rank(state, _WAITED)
        self._pending = [
            _Pending(
                vector_from_state(value),
                {Rank(int(rank)) for rank in name.removeprefix(_PENDING).split("_")},
            )
            for name, value in state.items()
            if name.startswith(_PENDING)
        ]
        self._max_n.restore(state)

"""Selective propagation for `dlion`: in each step a gradient goes to a few peers, not to all.

Called by `gradient_policies`, where the manifest says `exchange.propagation: selective`. What a
peer has not had yet is its *pending* gradient, the sum of all since it was last served; it gets
that as one, the largest entries under its link's budget (Max N).

Whom a step serves: `most` peers, the largest of

    score = ||pending|| * min(1, budget of the link / bytes of a whole gradient),

the information that waits, by how much of it the link carries now. Equal scores go in rank order
from this worker's own rank on, so that not all serve the same. But nobody waits for longer than
`within` steps: earliest deadline first, as many as must go now so that all later ones can keep
theirs with `most` a step (more, where there are too many for that, or where newcomers crowd). Whom
the link does not take even Max N's floor for is not chosen; when due, it gets what fits below the
floor, and where nothing fits it stays due.

With residual `none` what a link does not carry of the pending gradient is lost to it, and peers
served in the same step have one pending gradient together: `within` vectors of memory at most
(one more where the budget wins). With `perLink` the rest stays pending: sent + pending = the sum of
all gradients, and each peer has a vector of its own. The whole local gradient counts here at once.
What is pending counts by the local batch of the step that sends it.

Source: named by DLion's authors; the rule is ours. Earliest deadline first: Liu and Layland, 1973.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dlion_api.names import Rank
from dlion_worker.codecs import (
    AnyCoding,
    GradientPart,
    coded_bytes,
    decode_gradient,
    require_finite,
)
from dlion_worker.policies.sending import MaxN, Outgoing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dlion_worker.policies.interface import Flat, Layout, Value
    from dlion_worker.policies.sending import Payload

_PENDING: Final = "selective_pending_D_"
_WAITED: Final = "selective_waited_"
_NO_FLOOR: Final = 0.0


@dataclass(eq=False)
class _Pending:
    """What some peers have not had yet, the same for all of them."""

    gradient_D: Flat
    peers: set[Rank]


class SelectiveMaxN:
    """One worker's choice of peers, and what waits for each."""

    combines = True

    def __init__(
        self,
        layout: Layout,
        codec: AnyCoding,
        floor_percent: float | None,
        *,
        own: Rank,
        most: int,
        within: int,
        keeps_rest: bool,
    ) -> None:
        """`floor_percent` None: whole gradients, whatever the budgets."""
        self._size, self._is_whole = layout.size, floor_percent is None
        self._whole_bytes = coded_bytes(layout.size, layout.size, codec)
        self._max_n = MaxN(layout, codec, floor_percent or _NO_FLOOR)
        self._due_max_n = MaxN(layout, codec, _NO_FLOOR)
        self._own, self._most, self._within = own, most, within
        self._keeps_rest = keeps_rest
        self._pending: list[_Pending] = []
        self._waited: dict[Rank, int] = {}
        """Steps since each peer was served, the one under way included."""

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> Outgoing:
        """Payloads for the peers whose turn it is.

        Raises:
            ValueError: an entry is not finite.
        """
        require_finite(gradient_D, "gradient")
        self._take_in(gradient_D, peers)
        budgets = {} if self._is_whole else budget_bytes
        due = self._must_go(peers)
        payloads = self._served(due, budgets)
        wanted = self._most - len(payloads)
        for peer in self._by_score([p for p in peers if p not in due], budgets):
            if wanted <= 0:
                break
            one = self._payload(peer, budgets, is_due=False)
            if one is not None:
                payloads[peer], wanted = one, wanted - 1
        self._settle(payloads)
        return Outgoing(payloads, GradientPart(gradient_D))

    # ---- who -------------------------------------------------------------------------------------

    def _must_go(self, peers: Sequence[Rank]) -> list[Rank]:
        """The fewest, longest waiting first, so that all others can still go in time."""
        oldest = sorted(peers, key=lambda peer: (-self._waited[peer], self._turn(peer)))
        fewest = 0
        for at, peer in enumerate(oldest):
            steps_left = max(0, self._within - self._waited[peer])
            fewest = max(fewest, at + 1 - self._most_for(len(oldest)) * steps_left)
        return oldest[:fewest]

    def _most_for(self, count: int) -> int:
        """Peers a step by which all of them are served in time."""
        return max(self._most, -(-count // self._within))

    def _by_score(self, peers: list[Rank], budgets: Mapping[Rank, int]) -> list[Rank]:
        norms: dict[Rank, float] = {}
        for pending in self._pending:
            if not pending.peers.isdisjoint(peers):
                square_D = np.square(pending.gradient_D, dtype=np.float64)
                norm = float(np.sqrt(square_D.sum()))  # not BLAS: the same on any number of cores
                norms.update(dict.fromkeys(pending.peers, norm))

        def score(peer: Rank) -> float:
            carried = min(1.0, budgets.get(peer, self._whole_bytes) / self._whole_bytes)
            return norms[peer] * carried

        return sorted(peers, key=lambda peer: (-score(peer), self._turn(peer)))

    def _turn(self, peer: Rank) -> tuple[bool, Rank]:
        """Those of higher rank than this worker first."""
        return (peer < self._own, peer)

    # ---- what ------------------------------------------------------------------------------------

    def _take_in(self, gradient_D: Flat, peers: Iterable[Rank]) -> None:
        """One more gradient that nobody has had; who is new lacks nothing from before it."""
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

    def _served(self, due: list[Rank], budgets: Mapping[Rank, int]) -> dict[Rank, Payload]:
        served = {peer: self._payload(peer, budgets, is_due=True) for peer in due}
        return {peer: payload for peer, payload in served.items() if payload is not None}

    def _payload(self, peer: Rank, budgets: Mapping[Rank, int], *, is_due: bool) -> Payload | None:
        """What the peer gets now; None: its link takes nothing that is worth it."""
        pending_D = self._of(peer).gradient_D
        payload = self._max_n.prepare(pending_D, [peer], budgets).payloads.get(peer)
        if payload is None and is_due and self._waited[peer] >= self._within:
            payload = self._due_max_n.prepare(pending_D, [peer], budgets).payloads.get(peer)
            self._due_max_n.forget(peer)
            if payload is not None:
                self._max_n.forget(peer)
        return payload

    def _settle(self, payloads: Mapping[Rank, Payload]) -> None:
        """What was sent is not pending any more."""
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
        """A peer has left: what was pending for it is void."""
        self._max_n.forget(peer)
        self._waited.pop(peer, None)
        for pending in self._pending:
            pending.peers.discard(peer)
        self._pending = [pending for pending in self._pending if pending.peers]

    def state(self) -> dict[str, Value]:
        """What is pending and for whom, how long each has waited, what is saved up."""
        return {
            **{
                f"{_PENDING}{'_'.join(map(str, sorted(pending.peers)))}": pending.gradient_D.copy()
                for pending in self._pending
            },
            **{f"{_WAITED}{peer}": steps for peer, steps in self._waited.items()},
            **self._max_n.state(),
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave."""
        self._pending, self._waited = [], {}
        for name, value in state.items():
            if name.startswith(_PENDING):
                peers = {Rank(int(word)) for word in name.removeprefix(_PENDING).split("_")}
                self._pending.append(_Pending(np.array(value, np.float32), peers))
            elif name.startswith(_WAITED):
                self._waited[Rank(int(name.removeprefix(_WAITED)))] = int(value)
        self._max_n.restore(state)

"""How a worker joins a run: with all the others, or late.

If no worker trains yet, all wait for the expected workers and then start from the furthest state.
If others train, the latecomer adopts a state from one of them. At a barrier it also catches up
(`catch_up`), or first agrees on an iteration to join at (`join_barrier`). A worker that was paused
while others trained rejoins in the same way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.names import Rank
from dlion_api.protocol.membership import Membership
from dlion_api.spec import Job
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.catch_up import MAX_BUFFERED_BYTES
from dlion_core.links.events import StateRequest, StateSnapshot
from dlion_core.policies.catalogue import is_fully_synchronous, may_catch_up, may_step_concurrently
from dlion_core.policies.iteration_guard import MAX_LEAD
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.transport.peer_exchange import PeerExchange

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1


class Admission:
    """Admits one worker to the run."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        exchange: PeerExchange,
        inbox: WaitingInbox,
        membership: Callable[[], Membership | None],
        stopped: Callable[[], str | None],
        state_bytes: int,
        is_rejoin: bool = False,
        neighbours: Callable[[], Collection[Rank]] | None = None,
        on_wait: Callable[[int], None] = lambda _iteration: None,
    ) -> None:
        """`state_bytes`: size of a full state. `is_rejoin`: others trained while this worker was
        paused. `neighbours`: the peers to link with now; None: all. `on_wait` is called repeatedly
        meanwhile, with the last finished iteration."""
        deadline_s = job.spec.start_deadline_seconds
        self._deadline_s = (
            join_barrier.TRAINING_PEER_WAIT_S if is_rejoin and deadline_s is None else deadline_s
        )
        self._is_rejoin = is_rejoin
        self._neighbours = neighbours
        self._on_wait = on_wait
        self._job, self._rank = job, rank
        self._own_site = job.worker(rank).site
        self._exchange = exchange
        self._inbox = inbox
        self._membership = membership
        self._stopped = stopped
        self._has_barrier = is_fully_synchronous(job.spec)
        self._may_pull_early = may_step_concurrently(job.spec)
        self._peers_trained = False
        max_peers = MAX_BUFFERED_BYTES // max(1, state_bytes)
        self._max_peers_ahead = max_peers if may_catch_up(job.spec) and not is_rejoin else 0

    def join(self) -> StateSnapshot | None:
        """Wait for admission. Return a peer's state to adopt; None: keep the own one.

        Also returns when the run is over; `inbox.stop_reason` is then set. Raises: Interrupted when
        this worker is asked to stop.
        """
        began_s = alone_s = time.monotonic()
        while True:
            if self._inbox.stop_reason is not None:
                return self._pull(self._inbox.stopped)
            now_s, training = time.monotonic(), self._training_peers()
            alone_s = alone_s if training else now_s
            if training:
                self._peers_trained = True
                if now_s - alone_s >= join_barrier.ALL_LINKS_WAIT_S or self._has_all_links():
                    snapshot = self._training_state(training)
                    if snapshot is not None:
                        return snapshot
            elif self._peers_trained:
                self._ask_again()
            elif self._complete(now_s - began_s):
                return self._state_of_the_furthest()
            self._pause()

    def _ask_again(self) -> None:
        """Ask all peers again after the training peers are gone.

        Another latecomer may have adopted their state and joined since it answered. No worker may
        start from scratch beside it.
        """
        self._peers_trained = False
        self._inbox.discard_announcements()
        self._inbox.answers.clear()
        for peer in sorted(self._inbox.linked):
            self._exchange.send(peer, join_barrier.join_request())

    # ---- no worker trains yet --------------------------------------------------------------------

    def _complete(self, waited_s: float) -> bool:
        linked, answers = self._inbox.linked, self._inbox.answers
        if not all(peer in answers and not answers[peer].asked for peer in linked):
            return False
        if any(answer.lacks_quorum for answer in answers.values()):
            return False
        if self._all_are_linked():
            return True
        deadline_s = self._deadline_s
        # After startDeadlineSeconds, minSites sites are enough.
        if deadline_s is None or waited_s <= deadline_s or not self._enough_sites():
            return False
        _LOG.warning("starting without all workers after %.0f s", waited_s)
        return True

    def _all_are_linked(self) -> bool:
        membership, linked = self._membership(), self._inbox.linked
        workers = len(self._job.workers()) if membership is None else membership.expected_count
        if self._neighbours is None:
            return len(linked) >= workers - 1
        joined = 0 if membership is None else len(membership.members)
        return joined >= workers and linked >= set(self._neighbours())

    def _enough_sites(self) -> bool:
        membership, ranks = self._membership(), self._inbox.linked
        if self._neighbours is not None and membership is not None:
            ranks = {member.identity.rank for member in membership.ready()}
        sites = {self._own_site, *(self._job.worker(rank).site for rank in ranks)}
        return len(sites) >= self._job.spec.min_sites

    def _state_of_the_furthest(self) -> StateSnapshot | None:
        """Checkpoints may differ after a resume. At a barrier all start from equal weights;
        elsewhere only a worker without any takes others'."""
        furthest = max((a.done for a in self._inbox.answers.values()), default=0)
        own = self._inbox.iteration
        if furthest <= own or (own > 0 and not self._has_barrier):
            return None
        return self._pull(r for r, a in self._inbox.answers.items() if a.done == furthest)

    # ---- others train already --------------------------------------------------------------------

    def _has_all_links(self) -> bool:
        """Whether this worker is linked with every peer that is ready.

        An unlinked peer does not wait at a proposed iteration, so all would wait twice. A rejoining
        worker's membership may be older than the split; it expects all workers.
        """
        if self._is_rejoin:
            return self._all_are_linked()
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        peers = {member.identity.rank for member in ready} - {self._rank}
        if self._neighbours is not None:
            peers &= set(self._neighbours())
        return peers <= self._inbox.linked

    def _training_peers(self) -> list[Rank]:
        """Peers that train."""
        return sorted(rank for rank, answer in self._inbox.answers.items() if answer.is_training)

    def _training_state(self, training: list[Rank]) -> StateSnapshot | None:
        """Return a state to adopt; None: not available (yet)."""
        if not self._has_barrier:
            return self._pull(training)
        others = self._inbox.linked - set(training)
        if others & self._inbox.answers.keys() or len(training) > self._max_peers_ahead:
            return self._wait_at_barrier()
        return None if others else self._pull_ahead(training)

    def _pull_ahead(self, training: list[Rank]) -> StateSnapshot | None:
        """Pull a state while all peers train on; their later messages lead from it to theirs."""
        firsts, link_epochs = self._inbox.first_steps(), self._inbox.link_epochs
        if not set(training) <= firsts.keys():
            return None
        min_iteration = max(firsts[peer] for peer in training) - 1
        if min_iteration > min(firsts[peer] for peer in training) + MAX_LEAD:
            return self._wait_at_barrier()  # a peer reports an impossible step
        peers_ahead = {peer: link_epochs[peer] for peer in training}
        snapshot = self._pull(training[:1], StateRequest(at_least=min_iteration))
        if snapshot is None or snapshot.iteration < min_iteration:
            return None
        self._inbox.peers_ahead = peers_ahead
        return snapshot

    def _wait_at_barrier(self) -> StateSnapshot | None:
        """Return the state before F, which no peer passes alone; None: no peer trains any more."""
        inbox, barrier = self._inbox, join_barrier.JoinBarrier()
        while inbox.stop_reason is None and self._training_peers():
            for peer in barrier.peers_to_ask(inbox.link_epochs, inbox.answers):
                self._exchange.send(peer, join_barrier.join_request(barrier.iteration))
            inbox.discard_steps(barrier.iteration - 2)
            if barrier.is_agreed(inbox.link_epochs, inbox.answers):
                snapshot = self._pull_early(barrier) if self._may_pull_early else None
                if snapshot is not None:
                    return snapshot
                waiting = inbox.peers_with_step(barrier.iteration) & set(self._training_peers())
                snapshot = self._pull(waiting)
                if snapshot is not None and barrier.accepts(snapshot.iteration):
                    return replace(snapshot, iteration=barrier.iteration - 1)
            self._pause()
        return None

    def _pull_early(self, barrier: join_barrier.JoinBarrier) -> StateSnapshot | None:
        """Pull the state before F while all peers make the step F; None: not available."""
        training, before = self._training_peers(), barrier.iteration - 1
        if not barrier.should_pull_early(training, self._inbox.peers_with_step(before)):
            return None
        snapshot = self._pull(training[:1], StateRequest(at_least=before))
        return snapshot if snapshot is not None and snapshot.iteration == before else None

    def _pull(
        self, donors: Iterable[Rank], wanted: StateRequest | None = None
    ) -> StateSnapshot | None:
        """Return the first state that a donor gives."""
        for donor in sorted(donors):
            try:
                return self._exchange.pull_state(donor, wanted)
            except (UnavailableError, ContractError) as error:
                _LOG.warning("worker %d gave no state: %s", donor, error)
        return None

    def _pause(self) -> None:
        if (reason := self._stopped()) is not None:
            raise Interrupted(reason)
        self._on_wait(self._inbox.iteration)
        self._inbox.wait(SLICE_S)

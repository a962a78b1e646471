"""How a worker comes into a run: with all the others, or late, when they train already.

Owns the ways in. Where nobody trains yet, everybody waits until all expected workers are
linked (or, after `startDeadlineSeconds`, until `minSites` sites are), and who is behind takes the
state of who is furthest: after a resume checkpoints may differ. Where somebody trains, the
latecomer takes over a state from there; at a barrier it then makes up for what the others have done
meanwhile (`catching_up`) or, where that cannot be, agrees before on an iteration to come in at
(`rendezvous`). Where all who are in hold still for want of a quorum it waits with them.

A worker that has held still itself while others trained comes in in the same way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from dlion_api.errors import ContractError, UnavailableError
from dlion_api.membership import Membership
from dlion_api.names import Rank
from dlion_api.spec import Job
from dlion_worker.exchange import Exchange, StateSnapshot, StateWanted
from dlion_worker.policies.catalogue import (
    all_update_together,
    may_begin_beside,
    may_catch_up,
)
from dlion_worker.policies.horizon import LEAP
from dlion_worker.trainer import rendezvous
from dlion_worker.trainer.catching_up import MOST_BYTES
from dlion_worker.trainer.inbox import Inbox
from dlion_worker.trainer.interruption import Interrupted

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1


class Entrance:
    """The way of one worker into the run."""

    def __init__(
        self,
        *,
        job: Job,
        rank: Rank,
        exchange: Exchange,
        inbox: Inbox,
        membership: Callable[[], Membership | None],
        stopped: Callable[[], str | None],
        state_bytes: int,
        comes_back: bool = False,
        neighbours: Callable[[], Collection[Rank]] | None = None,
        waits: Callable[[int], None] = lambda _iteration: None,
    ) -> None:
        """`state_bytes`: of a whole state. `comes_back`: others have trained while it held still.
        `neighbours`: whom this worker is to be linked with now, if not with everybody. `waits`:
        called again and again meanwhile, with the last iteration that is done."""
        deadline_s = job.spec.start_deadline_seconds
        self._deadline_s = rendezvous.ALONE_S if comes_back and deadline_s is None else deadline_s
        self._comes_back = comes_back
        self._neighbours = neighbours
        self._waits = waits
        self._job, self._rank = job, rank
        self._own_site = job.worker(rank).site
        self._exchange = exchange
        self._inbox = inbox
        self._membership = membership
        self._stopped = stopped
        self._has_barrier = all_update_together(job.spec)
        self._begins_beside = may_begin_beside(job.spec)
        self._somebody_trained = False
        most = MOST_BYTES // max(1, state_bytes)
        self._most_ahead = most if may_catch_up(job.spec) and not comes_back else 0

    def come_in(self) -> StateSnapshot | None:
        """The state of a peer to go on from; None: this worker's own is right.

        Returns also where the run is over: `inbox.stop_reason` then says so. Raises `Interrupted`
        when this worker is told to stop meanwhile.
        """
        began_s = seen_s = time.monotonic()
        while True:
            if self._inbox.stop_reason is not None:
                return self._pull(self._inbox.stopped)
            now_s, inside = time.monotonic(), self._inside()
            seen_s = seen_s if inside else now_s
            if inside:
                self._somebody_trained = True
                if now_s - seen_s >= rendezvous.WHOLE_S or self._is_whole():
                    snapshot = self._over(inside)
                    if snapshot is not None:
                        return snapshot
            elif self._somebody_trained:
                self._ask_anew()
            elif self._complete(now_s - began_s):
                return self._of_the_furthest()
            self._pause()

    def _ask_anew(self) -> None:
        """Who trained is gone. Another latecomer may have taken its state and come in since it
        answered that it is out; nobody may begin from nothing beside it."""
        self._somebody_trained = False
        self._inbox.forget_promises()
        self._inbox.answers.clear()
        for peer in sorted(self._inbox.linked):
            self._exchange.send(peer, rendezvous.ask())

    # ---- nobody trains yet -----------------------------------------------------------------------

    def _complete(self, waited_s: float) -> bool:
        linked, answers = self._inbox.linked, self._inbox.answers
        if not all(peer in answers and not answers[peer].asked for peer in linked):
            return False
        if any(answer.is_still for answer in answers.values()):
            return False
        if self._all_are_there():
            return True
        deadline_s = self._deadline_s
        if deadline_s is None or waited_s <= deadline_s or not self._enough_sites():
            return False
        _LOG.warning("starting without everybody after %.0f s", waited_s)
        return True

    def _all_are_there(self) -> bool:
        membership, linked = self._membership(), self._inbox.linked
        workers = len(self._job.workers()) if membership is None else membership.expected_count
        if self._neighbours is None:
            return len(linked) >= workers - 1
        joined = 0 if membership is None else len(membership.members)
        return joined >= workers and linked >= set(self._neighbours())

    def _enough_sites(self) -> bool:
        membership, there = self._membership(), self._inbox.linked
        if self._neighbours is not None and membership is not None:
            there = {member.identity.rank for member in membership.ready()}
        sites = {self._own_site, *(self._job.worker(rank).site for rank in there)}
        return len(sites) >= self._job.spec.min_sites

    def _of_the_furthest(self) -> StateSnapshot | None:
        """At a barrier all start from equal weights; else only who has none takes others'."""
        furthest = max((a.done for a in self._inbox.answers.values()), default=0)
        own = self._inbox.iteration
        if furthest <= own or (own > 0 and not self._has_barrier):
            return None
        return self._pull(r for r, a in self._inbox.answers.items() if a.done == furthest)

    # ---- others train already --------------------------------------------------------------------

    def _is_whole(self) -> bool:
        """Whether it is linked with all who are there. Whom it is not linked with yet holds at no
        iteration that it names, so that all would wait twice. What one that has held still knows of
        members may be of before the split: it takes all to be there."""
        if self._comes_back:
            return self._all_are_there()
        membership = self._membership()
        ready = () if membership is None else membership.ready()
        there = {member.identity.rank for member in ready} - {self._rank}
        if self._neighbours is not None:
            there &= set(self._neighbours())
        return there <= self._inbox.linked

    def _inside(self) -> list[Rank]:
        """Peers that train."""
        return sorted(rank for rank, answer in self._inbox.answers.items() if answer.is_in)

    def _over(self, inside: list[Rank]) -> StateSnapshot | None:
        """A state to go on from; None: not to be had (yet)."""
        if not self._has_barrier:
            return self._pull(inside)
        others = self._inbox.linked - set(inside)
        if others & self._inbox.answers.keys() or len(inside) > self._most_ahead:
            return self._meet()
        return None if others else self._pull_ahead(inside)

    def _pull_ahead(self, inside: list[Rank]) -> StateSnapshot | None:
        """A state while all go on, from which what they send leads on to theirs."""
        firsts, lives = self._inbox.first_steps(), self._inbox.lives
        if not set(inside) <= firsts.keys():
            return None
        least = max(firsts[peer] for peer in inside) - 1
        if least > min(firsts[peer] for peer in inside) + LEAP:
            return self._meet()  # somebody says what cannot be
        ahead = {peer: lives[peer] for peer in inside}
        snapshot = self._pull(inside[:1], StateWanted(at_least=least))
        if snapshot is None or snapshot.iteration < least:
            return None
        self._inbox.ahead = ahead
        return snapshot

    def _meet(self) -> StateSnapshot | None:
        """The state before F, which nobody passes alone; None where nobody trains any more."""
        inbox, meeting = self._inbox, rendezvous.Meeting()
        while inbox.stop_reason is None and self._inside():
            for peer in meeting.to_ask(inbox.lives, inbox.answers):
                self._exchange.send(peer, rendezvous.ask(meeting.iteration))
            inbox.forget_steps(meeting.iteration - 2)
            if meeting.agreed(inbox.lives, inbox.answers):
                snapshot = self._pull_beside(meeting) if self._begins_beside else None
                if snapshot is not None:
                    return snapshot
                held = inbox.heard_at(meeting.iteration) & set(self._inside())
                snapshot = self._pull(held)
                if snapshot is not None and meeting.holds(snapshot.iteration):
                    return replace(snapshot, iteration=meeting.iteration - 1)
            self._pause()
        return None

    def _pull_beside(self, meeting: rendezvous.Meeting) -> StateSnapshot | None:
        """The state before F while everybody makes the step F; None: not to be had (any more)."""
        inside, before = self._inside(), meeting.iteration - 1
        if not meeting.tries_beside(inside, self._inbox.heard_at(before)):
            return None
        snapshot = self._pull(inside[:1], StateWanted(at_least=before))
        return snapshot if snapshot is not None and snapshot.iteration == before else None

    def _pull(
        self, donors: Iterable[Rank], wanted: StateWanted | None = None
    ) -> StateSnapshot | None:
        """The state of the first that gives one."""
        for donor in sorted(donors):
            try:
                return self._exchange.pull_state(donor, wanted)
            except (UnavailableError, ContractError) as error:
                _LOG.warning("worker %d gave no state: %s", donor, error)
        return None

    def _pause(self) -> None:
        if (reason := self._stopped()) is not None:
            raise Interrupted(reason)
        self._waits(self._inbox.iteration)
        self._inbox.wait(SLICE_S)

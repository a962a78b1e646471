"""Which sites are joined with this worker, by links alone, and whether these are enough.

Called by `trainer.standstill`, for the trainer and the simulator. Every worker tells its peers with
whom it is linked, and hands on what others have told (a link state each, by origin and version).
From these all workers that can reach each other, over whatever peers, know the same graph, so they
count the same sites: once news has gone from one end of the side to the other they decide alike,
though each notices a broken link at a time of its own. No coordinator is asked.

A link counts from the moment that it is up. But who holds still counts a new one only when its peer
has told its own links, or asks to come in: before, that peer may itself have to wait for this one.

Of a peer that is linked only its own word counts: others can neither outdate it nor invent more.

Source: flooding of link states as in OSPF (RFC 2328, section 13), without its ages: what is out of
reach does not count, however long it is remembered. Who hears of itself what it has not told goes
above that, as there (13.4).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.policies.interface import (
    Instruction,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    Refuse,
    Send,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlion_api.names import SiteName
    from dlion_worker.policies.interface import Event

_HEAD = struct.Struct("<IQQBI")
_RANK = struct.Struct("<I")
_LATEST = 2**53
"""Incarnation and version of a link state, at most."""


@dataclass(frozen=True)
class LinkState:
    """What one worker says of itself."""

    origin: Rank
    incarnation: int
    version: int
    """Counts what the incarnation has told; a later one, or one of a later incarnation, stands."""
    is_still: bool
    """Whether it holds still, or has since and has not gone on."""
    linked: frozenset[Rank]

    @property
    def age(self) -> tuple[int, int, bool]:
        """Of two of one origin the larger is the newer. What peers note of one that asks to come in
        stands until it has told more itself."""
        return self.incarnation, self.version, self.is_still


def encode(states: Iterable[LinkState]) -> bytes:
    """As the payload of a `REACH` message."""
    parts: list[bytes] = []
    for state in states:
        parts.append(_HEAD.pack(state.origin, *state.age, len(state.linked)))
        parts += (_RANK.pack(rank) for rank in sorted(state.linked))
    return b"".join(parts)


def decode(payload: bytes | memoryview, rank_of: Callable[[int], Rank]) -> list[LinkState]:
    """The link states in a payload, one of each origin. `rank_of` raises LookupError for who cannot
    take part. Reads no further than the first thing that is wrong.

    Raises:
        ContractError: it is cut short, out of order, of absurd age, or names workers twice or such
            as there are not.
    """
    rest = memoryview(payload)
    states: dict[Rank, LinkState] = {}
    while rest:
        try:
            origin, incarnation, version, still, count = _HEAD.unpack_from(rest)
            ranks = rest[_HEAD.size : _HEAD.size + count * _RANK.size]
            if ranks.nbytes != count * _RANK.size or origin in states:
                raise ContractError(f"REACH: links of worker {origin} cut short, or told twice")
            linked = _rising(ranks, rank_of)
            state = LinkState(rank_of(origin), incarnation, version, bool(still), linked)
        except (struct.error, LookupError) as error:
            raise ContractError(f"REACH of {len(payload)} bytes: {error}") from error
        if max(state.age) > _LATEST:
            raise ContractError(f"REACH of worker {origin}, age {state.age}; allowed: {_LATEST}")
        states[state.origin] = state
        rest = rest[_HEAD.size + ranks.nbytes :]
    return list(states.values())


def _rising(ranks: memoryview, rank_of: Callable[[int], Rank]) -> frozenset[Rank]:
    """Each larger than the one before. Raises: ContractError, and what `rank_of` raises."""
    found: list[Rank] = []
    for (rank,) in _RANK.iter_unpack(ranks):
        if found and rank <= found[-1]:
            raise ContractError(f"REACH: a link with worker {rank} behind that with {found[-1]}")
        found.append(rank_of(rank))
    return frozenset(found)


class Quorum:
    """What one worker knows of its side."""

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        *,
        least_sites: int,
        site_of: Callable[[Rank], SiteName],
        version: int = 0,
    ) -> None:
        """`least_sites`: with fewer a side holds still. `site_of`: raises LookupError for a rank
        that cannot take part. `version`: of what this incarnation has told already."""
        self._rank = rank
        self._least_sites, self._site_of = least_sites, site_of
        self._site_by_rank: dict[Rank, SiteName] = {}
        self._linked: set[Rank] = set()
        self._counted: set[Rank] = set()
        """Of the linked, those that count."""
        self._told = LinkState(rank, incarnation, version, False, frozenset())
        self._own_words: dict[Rank, LinkState] = {}
        """Of the linked, what each has told last of itself."""
        self._rumours: dict[Rank, LinkState] = {}
        """What was told last of each of the others, by whomever."""
        self._news: dict[Rank, tuple[LinkState, Rank]] = {}
        """What is to be handed on, and who told it."""
        self._strangers: set[Rank] = set()
        """Peers that have come and been told nothing yet."""
        self._early: set[Rank] = set()
        """Peers whose first words came before the word that their link is up."""
        self._side: frozenset[Rank] | None = None
        """As `side` has it; None: to be found anew."""
        self.is_still = False
        """Whether this worker holds still, or has since and has not gone on: whoever holds is not
        to count a link before its peer has spoken."""

    # ---- what has happened ---------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event; of messages only `REACH` and `MEET` mean anything here."""
        match event:
            case MemberJoined(rank=rank):
                self._side = None
                self._linked.add(rank)
                self._strangers.add(rank)
                if rank in self._early or not self.is_still:
                    self._counted.add(rank)
                self._early.discard(rank)
            case MemberLeft(rank=rank):
                self._side = None
                for known in (self._linked, self._counted, self._strangers, self._early):
                    known.discard(rank)
                if (state := self._own_words.pop(rank, None)) is not None:
                    self._keep(state)
            case MessageArrived(sender=sender, message=message):
                if message.kind is MessageKind.REACH:
                    return self._reach(sender, message)
                if message.kind is MessageKind.MEET:
                    self._asks_to_come_in(sender)
        return []

    def _spoke(self, peer: Rank) -> None:
        self._side = None
        (self._counted if peer in self._linked else self._early).add(peer)

    def _asks_to_come_in(self, peer: Rank) -> None:
        """So it trains nowhere, whatever was told of an earlier life of it."""
        self._spoke(peer)
        known = self._state_of(peer) or LinkState(peer, 0, 0, True, frozenset())
        note = self._own_words[peer] = replace(known, is_still=True, linked=frozenset())
        if note.age > known.age:
            self._news[peer] = (note, peer)

    def _reach(self, sender: Rank, message: Message) -> list[Instruction]:
        try:
            states = decode(message.payload, self._known)
        except ContractError as error:
            return [Refuse(sender, str(error))]
        self._spoke(sender)
        for state in states:
            known = self._own_words.get(state.origin)
            if state.origin == self._rank:
                self._go_above(state)
            elif state.origin == sender:
                if known is None or state.age > known.age:
                    self._own_words[sender] = state
                    self._news[sender] = (state, sender)
            elif (known is None or state.age > known.age) and self._keep(state):
                self._news[state.origin] = (state, sender)
        return []

    def _keep(self, state: LinkState) -> bool:
        """As the newest that was told of its origin; whether it is."""
        known = self._rumours.get(state.origin)
        if known is not None and state.age <= known.age:
            return False
        self._rumours[state.origin] = state
        return True

    def _go_above(self, state: LinkState) -> None:
        """Somebody has told of this worker what it has not: the next that it tells is newer."""
        if state.age > self._told.age and max(state.age) < _LATEST:
            older = frozenset({self._rank})  # which it is never linked with: told anew
            self._told = replace(
                self._told, incarnation=state.incarnation, version=state.version, linked=older
            )

    def _state_of(self, rank: Rank) -> LinkState | None:
        own = self._own_words.get(rank) if rank in self._linked else None
        return self._rumours.get(rank) if own is None else own

    def _known(self, rank: int) -> Rank:
        known = Rank(rank)
        if known not in self._site_by_rank:
            self._site_by_rank[known] = self._site_of(known)
        return known

    def news(self) -> list[Send]:
        """What peers have to be told since the last call.

        A state goes on only to those that its origin has not told itself.
        """
        to_tell: dict[Rank, dict[Rank, LinkState]] = {peer: {} for peer in sorted(self._linked)}
        is_still, counted = self.is_still, frozenset(self._counted)
        if (is_still, counted) != (self._told.is_still, self._told.linked):
            version = self._told.version + 1
            self._told = replace(self._told, version=version, is_still=is_still, linked=counted)
            for states in to_tell.values():
                states[self._rank] = self._told
        for state, teller in self._news.values():
            for peer in self._linked - state.linked - {teller, state.origin}:
                to_tell[peer][state.origin] = state
        everything = {self._rank: self._told, **self._rumours, **self._own_words}
        for peer in self._strangers:
            to_tell[peer] = everything
        self._news = {}
        self._strangers = set()
        return [
            Send(peer, Message(MessageKind.REACH, 0, payload=encode(states.values())))
            for peer, states in to_tell.items()
            if states
        ]

    # ---- what follows --------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of what it has told last."""
        return self._told.version

    def side(self) -> frozenset[Rank]:
        """The workers that this one reaches over links, itself included."""
        if self._side is None:
            self._side = self._found()
        return self._side

    def _found(self) -> frozenset[Rank]:
        found, to_visit = {self._rank}, [self._rank]
        while to_visit:
            at = to_visit.pop()
            new = self._links_of(at) - found
            found |= new
            to_visit += sorted(new)
        return frozenset(found)

    def _links_of(self, rank: Rank) -> frozenset[Rank]:
        if rank == self._rank:
            return frozenset(self._counted)
        state = self._state_of(rank)
        return frozenset() if state is None else state.linked

    def sites(self) -> set[SiteName]:
        """The sites of this side."""
        return {self._site_by_rank[self._known(rank)] for rank in self.side()}

    def is_met(self) -> bool:
        """Whether this side has enough sites to train."""
        return len(self.sites()) >= self._least_sites

    def others_went_on(self) -> bool:
        """Whether some worker of this side is known to train, or to have all along."""
        states = (self._state_of(rank) for rank in self.side() - {self._rank})
        return any(state is not None and not state.is_still for state in states)

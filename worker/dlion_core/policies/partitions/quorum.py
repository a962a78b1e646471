"""Determine from links alone which sites are reachable, and whether they are a quorum.

Used by `lifecycle.quorum_gate`, for the trainer and the simulator. Every worker sends its peers the
list of its links, and forwards those of others, by origin and version (link-state flooding). So all
workers that can reach each other know the same graph and count the same sites. Once an update has
crossed the partition they decide alike, though each notices a broken link at its own time. No
coordinator is involved.

A link counts once it is up. But a halted worker counts a new link only when its peer has sent its
own links or asks to join. Before that, the peer may itself wait for this worker.

For a linked peer only its own messages count: no other worker can replace them.

Source: flooding of link states as in OSPF (RFC 2328, section 13), without ages: unreachable workers
do not count, however long they are remembered. A worker that receives a newer state of itself
continues from that version, as there (13.4).
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from dlion_api.errors import ContractError
from dlion_api.names import Rank, SiteName
from dlion_core.policies.interface import (
    Event,
    Instruction,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    SendMessage,
)

_HEAD = struct.Struct("<IQQBI")
_RANK = struct.Struct("<I")
_LATEST = 2**53
"""Maximum incarnation and version of a link state."""


@dataclass(frozen=True)
class LinkStateAdvertisement:
    """Links that one worker reports about itself."""

    origin: Rank
    incarnation: int
    version: int
    """Counter within an incarnation. The highest incarnation, then version, is valid."""
    is_halted: bool
    """Whether it is halted, or was and has not continued."""
    linked: frozenset[Rank]

    @property
    def age(self) -> tuple[int, int, bool]:
        """Sort key: of two states of one origin, the larger is newer. What peers record about a
        joining worker is valid until that worker sends more itself."""
        return self.incarnation, self.version, self.is_halted


def encode_link_states(states: Iterable[LinkStateAdvertisement]) -> bytes:
    """Encode as the payload of a `REACH` message."""
    parts: list[bytes] = []
    for state in states:
        parts.append(_HEAD.pack(state.origin, *state.age, len(state.linked)))
        parts += (_RANK.pack(rank) for rank in sorted(state.linked))
    return b"".join(parts)


def decode_link_states(
    payload: bytes | memoryview, rank_of: Callable[[int], Rank]
) -> list[LinkStateAdvertisement]:
    """Decode the link states of a payload, one per origin.

    `rank_of` raises LookupError for ranks that cannot take part. Raises ContractError at the first
    state that is truncated, out of order, of invalid age, or with repeated or unknown workers.
    """
    rest = memoryview(payload)
    states: dict[Rank, LinkStateAdvertisement] = {}
    while rest:
        try:
            origin, incarnation, version, still, count = _HEAD.unpack_from(rest)
            ranks = rest[_HEAD.size : _HEAD.size + count * _RANK.size]
            if ranks.nbytes != count * _RANK.size or origin in states:
                raise ContractError(f"REACH: links of worker {origin} truncated or repeated")
            linked = _rising(ranks, rank_of)
            state = LinkStateAdvertisement(
                rank_of(origin), incarnation, version, bool(still), linked
            )
        except (struct.error, LookupError) as error:
            raise ContractError(f"REACH of {len(payload)} bytes: {error}") from error
        if max(state.age) > _LATEST:
            raise ContractError(f"REACH of worker {origin}, age {state.age}; allowed: {_LATEST}")
        states[state.origin] = state
        rest = rest[_HEAD.size + ranks.nbytes :]
    return list(states.values())


def _rising(ranks: memoryview, rank_of: Callable[[int], Rank]) -> frozenset[Rank]:
    """Decode strictly increasing ranks. Raises ContractError, and what `rank_of` raises."""
    decoded = [rank for (rank,) in _RANK.iter_unpack(ranks)]
    for one, following in pairwise(decoded):
        if following <= one:
            raise ContractError(f"REACH: ranks of links not increasing: {one}, {following}")
    return frozenset(map(rank_of, decoded))


class SiteQuorum:
    """What one worker knows about its partition."""

    def __init__(
        self,
        rank: Rank,
        incarnation: int,
        *,
        min_sites: int,
        site_of: Callable[[Rank], SiteName],
        version: int = 0,
    ) -> None:
        """`min_sites`: with fewer, a partition is halted. `site_of`: raises LookupError for ranks
        that cannot take part. `version`: last version that this incarnation has sent."""
        self._rank = rank
        self._min_sites, self._site_of = min_sites, site_of
        self._site_by_rank: dict[Rank, SiteName] = {}
        self._linked: set[Rank] = set()
        self._counted: set[Rank] = set()
        """Linked peers that count."""
        self._own_state = LinkStateAdvertisement(rank, incarnation, version, False, frozenset())
        self._linked_states: dict[Rank, LinkStateAdvertisement] = {}
        """Latest state of each linked peer, received from itself."""
        self._other_states: dict[Rank, LinkStateAdvertisement] = {}
        """Latest state of each other worker, received from any peer."""
        self._to_forward: dict[Rank, tuple[LinkStateAdvertisement, Rank]] = {}
        """States to forward, with the peer that sent them."""
        self._new_peers: set[Rank] = set()
        """New peers that were sent nothing yet."""
        self._early: set[Rank] = set()
        """Peers that sent a message before `MemberJoined`."""
        self._reachable: frozenset[Rank] | None = None
        """Result of the last `reachable_workers`; None: search again."""
        self.is_halted = False
        """Whether this worker is halted, or was and has not continued. While true, a link counts
        only after a message of its peer."""

    # ---- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Handle one event. Only `REACH` and `MEET` messages matter here."""
        match event:
            case MemberJoined(rank=rank):
                self._reachable = None
                self._linked.add(rank)
                self._new_peers.add(rank)
                if rank in self._early or not self.is_halted:
                    self._counted.add(rank)
                self._early.discard(rank)
            case MemberLeft(rank=rank):
                self._reachable = None
                for known in (self._linked, self._counted, self._new_peers, self._early):
                    known.discard(rank)
                if (state := self._linked_states.pop(rank, None)) is not None:
                    self._keep(state)
            case MessageArrived(sender=sender, message=message):
                if message.kind is MessageKind.REACH:
                    return self._links_received(sender, message)
                if message.kind is MessageKind.MEET:
                    self._join_requested(sender)
        return []

    def _count_link(self, peer: Rank) -> None:
        self._reachable = None
        (self._counted if peer in self._linked else self._early).add(peer)

    def _join_requested(self, peer: Rank) -> None:
        """A joining peer does not train, whatever was reported about its earlier incarnation."""
        self._count_link(peer)
        known = self._state_of(peer) or LinkStateAdvertisement(peer, 0, 0, True, frozenset())
        note = self._linked_states[peer] = replace(known, is_halted=True, linked=frozenset())
        if note.age > known.age:
            self._to_forward[peer] = (note, peer)

    def _links_received(self, sender: Rank, message: Message) -> list[Instruction]:
        try:
            states = decode_link_states(message.payload, self._known)
        except ContractError as error:
            return [RejectMessage(sender, str(error))]
        self._count_link(sender)
        for state in states:
            known = self._linked_states.get(state.origin)
            if state.origin == self._rank:
                self._supersede(state)
            elif state.origin == sender:
                if known is None or state.age > known.age:
                    self._linked_states[sender] = state
                    self._to_forward[sender] = (state, sender)
            elif (known is None or state.age > known.age) and self._keep(state):
                self._to_forward[state.origin] = (state, sender)
        return []

    def _keep(self, state: LinkStateAdvertisement) -> bool:
        """Store the state if it is the newest of its origin; return whether it is."""
        known = self._other_states.get(state.origin)
        if known is not None and state.age <= known.age:
            return False
        self._other_states[state.origin] = state
        return True

    def _supersede(self, state: LinkStateAdvertisement) -> None:
        """A peer has a state of this worker that it did not send: the next one gets a higher
        version."""
        if state.age > self._own_state.age and max(state.age) < _LATEST:
            older = frozenset({self._rank})  # never true, so that the state is sent again
            self._own_state = replace(
                self._own_state, incarnation=state.incarnation, version=state.version, linked=older
            )

    def _state_of(self, rank: Rank) -> LinkStateAdvertisement | None:
        own = self._linked_states.get(rank) if rank in self._linked else None
        return self._other_states.get(rank) if own is None else own

    def _known(self, rank: int) -> Rank:
        known = Rank(rank)
        if known not in self._site_by_rank:
            self._site_by_rank[known] = self._site_of(known)
        return known

    def pending_messages(self) -> list[SendMessage]:
        """Return messages for peers since the last call. A state is not forwarded to peers that
        receive it from its origin."""
        outgoing: dict[Rank, dict[Rank, LinkStateAdvertisement]] = {
            peer: {} for peer in sorted(self._linked)
        }
        is_halted, counted = self.is_halted, frozenset(self._counted)
        if (is_halted, counted) != (self._own_state.is_halted, self._own_state.linked):
            version = self._own_state.version + 1
            self._own_state = replace(
                self._own_state, version=version, is_halted=is_halted, linked=counted
            )
            for states in outgoing.values():
                states[self._rank] = self._own_state
        for state, sender in self._to_forward.values():
            for peer in self._linked - state.linked - {sender, state.origin}:
                outgoing[peer][state.origin] = state
        all_states = {self._rank: self._own_state, **self._other_states, **self._linked_states}
        for peer in self._new_peers:
            outgoing[peer] = all_states
        self._to_forward = {}
        self._new_peers = set()
        return [
            SendMessage(
                peer, Message(MessageKind.REACH, 0, payload=encode_link_states(states.values()))
            )
            for peer, states in outgoing.items()
            if states
        ]

    # ---- results ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._own_state.version

    def reachable_workers(self) -> frozenset[Rank]:
        """Return the workers that this one reaches over links, itself included."""
        if self._reachable is None:
            reached = [self._rank]
            for at in reached:  # which grows meanwhile
                reached += self._links_of(at).difference(reached)
            self._reachable = frozenset(reached)
        return self._reachable

    def _links_of(self, rank: Rank) -> frozenset[Rank]:
        if rank == self._rank:
            return frozenset(self._counted)
        state = self._state_of(rank)
        return frozenset() if state is None else state.linked

    def sites(self) -> set[SiteName]:
        return {self._site_by_rank[self._known(rank)] for rank in self.reachable_workers()}

    def is_met(self) -> bool:
        return len(self.sites()) >= self._min_sites

    def others_kept_training(self) -> bool:
        """Return whether some reachable worker is known to train."""
        states = (self._state_of(rank) for rank in self.reachable_workers() - {self._rank})
        return any(state is not None and not state.is_halted for state in states)

"""Messages of `hierarchical`: kinds, checks, and records of received and sent ones.

A message's weights version is its kind; for a step report it may encode a view of gateways
(`site_gateways`). Entries travel as `GRADIENT`; if all are zero, as `PROGRESS` without a payload.
Messages are untrusted and stored by sender, so no peer can replace another's contribution.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import decode_gradient
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.claims.samples import check_samples
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.hierarchical.site_gateways import from_version
from dlion_core.policies.interface import Message, MessageKind

TICK: Final = 0
RESULT: Final = 1
PART: Final = 2
MEAN: Final = 3
"""Kinds: a local step is done; an iteration's result; the sender's gradient; from 3 on, the mean of
site (or group) number kind - 3."""

_KEPT = 2
"""Iterations kept per sender and source. A sender that waits for this worker is not further
ahead."""

ContributionSource = int
"""Source of a gradient: a worker's rank, or a site's `mean_source`."""


def mean_source(group: int) -> ContributionSource:
    """Return the negative number that represents a site's mean among ranks."""
    return -1 - group


@dataclass(frozen=True)
class SiteMessage:
    """A message and its decoded contribution."""

    message: Message
    share: Contribution


def is_tick(message: Message) -> bool:
    """Whether it reports a local step, with or without a view of gateways."""
    is_view = from_version(message.weights_version) is not None
    return message.weights_version == TICK or (is_view and message.kind is MessageKind.PROGRESS)


def check_source(
    sender: Rank, message: Message, own: Rank, group_of: Mapping[Rank, int], groups: int
) -> None:
    """Raise ContractError unless the sender may send this message to worker `own`."""
    what, group, home = message.weights_version, group_of[sender], group_of[own]
    name = message.kind.name
    if message.iteration < 1:
        raise ContractError(f"{name} of iteration {message.iteration}; allowed: 1 on")
    if what >= MEAN + groups:
        raise ContractError(f"{name} of kind {what}; allowed: {TICK} to {MEAN + groups - 1}")
    if what == PART and group != home:
        raise ContractError(f"gradient of worker {sender}, which is of another site")
    if what >= MEAN and (what - MEAN == home or group not in (home, what - MEAN)):
        raise ContractError(f"mean of site number {what - MEAN} from worker {sender}")


def decode_contribution(message: Message, context: PolicyContext) -> Contribution:
    """Return the contribution of a checked message. Raises ContractError if it is invalid."""
    workers = 1 if message.weights_version == PART else len(context.ranks)
    samples = message.local_batch_size
    check_samples("gradient", samples, workers * context.max_batch_at(message.iteration))
    if message.kind is MessageKind.GRADIENT:
        return Contribution(samples, decode_gradient(message.payload, context.layout.size))
    if message.payload:
        raise ContractError("PROGRESS with a payload; allowed: none")
    return Contribution(samples, None)


class SentLog:
    """Records sent messages by receiver, and the senders of received ones, until the iteration
    ends."""

    def __init__(self) -> None:
        self._to: set[tuple[Rank, int, int]] = set()
        self._from: dict[Rank, int] = {}

    def mark_sent(self, rank: Rank, message: Message) -> bool:
        """Record a message to that worker; return whether it is the first of its kind and
        iteration."""
        key = (rank, message.weights_version, message.iteration)
        was_given = key in self._to
        self._to.add(key)
        return not was_given

    def has(self, rank: Rank, what: int, iteration: int) -> bool:
        return (rank, what, iteration) in self._to

    def record_received(self, rank: Rank, iteration: int) -> None:
        self._from[rank] = iteration

    def senders_for(self, iteration: int) -> list[Rank]:
        """Return workers that last sent a message of that iteration."""
        return sorted(rank for rank, at in self._from.items() if at == iteration)

    def forget_before(self, iteration: int) -> None:
        self._to = {one for one in self._to if one[2] >= iteration}

    def left(self, rank: Rank) -> None:
        self._to = {one for one in self._to if one[0] != rank}
        self._from.pop(rank, None)


class ReceivedContributions:
    """Received gradients and means, until their iteration ends."""

    def __init__(self) -> None:
        self._messages: dict[tuple[ContributionSource, int], dict[Rank, SiteMessage]] = {}
        self._kept: dict[tuple[ContributionSource, Rank], list[int]] = {}
        """Iterations kept, by source and sender."""

    def add(self, sender: Rank, contribution: SiteMessage) -> None:
        """Keep the first contribution of a sender per source and iteration."""
        what, iteration = contribution.message.weights_version, contribution.message.iteration
        source = sender if what == PART else mean_source(what - MEAN)
        kept = self._kept.setdefault((source, sender), [])
        if iteration in kept:
            return
        kept.append(iteration)
        self._messages.setdefault((source, iteration), {})[sender] = contribution
        if len(kept) > _KEPT:
            self._drop(source, sender, min(kept))

    def _drop(self, source: ContributionSource, sender: Rank, iteration: int) -> None:
        self._kept[source, sender].remove(iteration)
        by_sender = self._messages[source, iteration]
        del by_sender[sender]
        if not by_sender:
            del self._messages[source, iteration]

    def known(self, source: ContributionSource, iteration: int) -> SiteMessage | None:
        """Return a source's contribution to an iteration, from the sender of lowest rank."""
        by_sender = self._messages.get((source, iteration))
        return by_sender[min(by_sender)] if by_sender else None

    def means(self, iteration: int) -> Iterator[tuple[Rank, SiteMessage]]:
        sources = (of for of, at in self._messages if of < 0 and at == iteration)
        for source in sorted(sources):
            yield from sorted(self._messages[source, iteration].items(), key=lambda one: one[0])

    def forget_before(self, iteration: int) -> None:
        for (source, sender), kept in self._kept.items():
            for at in [at for at in kept if at < iteration]:
                self._drop(source, sender, at)

"""What workers of `hierarchical` tell each other: kinds of messages, their checks, what is kept.

A message's weights version says what it is (of a word that a step is done, a view of gateways, too:
`site_gateways`). Entries go as `GRADIENT`; where all are zeros, the same
goes as `PROGRESS` without a payload. Whatever arrives is untrusted; it is kept by its sender, so
that nobody can displace what another has said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlion_api.errors import ContractError
from dlion_worker.codecs import decode_gradient
from dlion_worker.policies.interface import Message, MessageKind
from dlion_worker.policies.site_gateways import from_version
from dlion_worker.policies.site_means import Share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dlion_api.names import Rank
    from dlion_worker.policies.building import Context

TICK: Final = 0
RESULT: Final = 1
PART: Final = 2
MEAN: Final = 3
"""A local step done; an iteration's result; its sender's gradient; from here on the mean of the
site (or group) of that number."""

_KEPT = 2
"""Iterations kept of what each sender says of a source: one that waits for this worker is not
further."""

Source = int
"""Whose gradient it is: a worker's, by rank; a site's, as `mean_source`."""


def mean_source(group: int) -> Source:
    """Stands for a site's mean among ranks."""
    return -1 - group


@dataclass(frozen=True)
class Told:
    """A message, and what it brings."""

    message: Message
    share: Share


def is_tick(message: Message) -> bool:
    """Whether it says that a local step is done, with a view of gateways or without."""
    is_view = from_version(message.weights_version) is not None
    return message.weights_version == TICK or (is_view and message.kind is MessageKind.PROGRESS)


def check_source(
    sender: Rank, message: Message, own: Rank, group_of: Mapping[Rank, int], groups: int
) -> None:
    """Passes what that sender may say to worker `own`.

    Raises:
        ContractError: it may not.
    """
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


def share_of(message: Message, context: Context) -> Share:
    """What a checked message brings.

    Raises:
        ContractError: of no samples or too many, or not this model's gradient.
    """
    workers = 1 if message.weights_version == PART else len(context.ranks)
    most = workers * context.most_samples
    samples = message.local_batch_size
    if not 1 <= samples <= most:
        raise ContractError(f"gradient of {samples} samples; allowed: 1 to {most}")
    if message.kind is MessageKind.GRADIENT:
        return Share(samples, decode_gradient(message.payload, context.layout.size))
    if message.payload:
        raise ContractError("PROGRESS with a payload; allowed: none")
    return Share(samples, None)


class Given:
    """What has been sent to whom, and who has sent something here, until its iteration is over."""

    def __init__(self) -> None:
        self._to: set[tuple[Rank, int, int]] = set()
        self._from: dict[Rank, int] = {}

    def is_news(self, rank: Rank, message: Message) -> bool:
        """Whether that worker is given such a message of that iteration for the first time."""
        key = (rank, message.weights_version, message.iteration)
        was_given = key in self._to
        self._to.add(key)
        return not was_given

    def has(self, rank: Rank, what: int, iteration: int) -> bool:
        """Whether it has been given that."""
        return (rank, what, iteration) in self._to

    def came(self, rank: Rank, iteration: int) -> None:
        """That worker has sent something of that iteration here."""
        self._from[rank] = iteration

    def givers(self, iteration: int) -> list[Rank]:
        """Who has last sent something of that iteration here."""
        return sorted(rank for rank, at in self._from.items() if at == iteration)

    def forget_before(self, iteration: int) -> None:
        """Drops what is of earlier iterations."""
        self._to = {one for one in self._to if one[2] >= iteration}

    def left(self, rank: Rank) -> None:
        """Of what that worker was given nothing is known."""
        self._to = {one for one in self._to if one[0] != rank}
        self._from.pop(rank, None)


class Heard:
    """Gradients and means that have come, until their iteration is over."""

    def __init__(self) -> None:
        self._told: dict[tuple[Source, int], dict[Rank, Told]] = {}
        self._kept: dict[tuple[Source, Rank], list[int]] = {}
        """Iterations kept of what each sender says of a source."""

    def add(self, sender: Rank, told: Told) -> None:
        """Keeps the first that a sender says of a source and iteration."""
        what, iteration = told.message.weights_version, told.message.iteration
        source = sender if what == PART else mean_source(what - MEAN)
        kept = self._kept.setdefault((source, sender), [])
        if iteration in kept:
            return
        kept.append(iteration)
        self._told.setdefault((source, iteration), {})[sender] = told
        if len(kept) > _KEPT:
            self._drop(source, sender, min(kept))

    def _drop(self, source: Source, sender: Rank, iteration: int) -> None:
        self._kept[source, sender].remove(iteration)
        by_sender = self._told[source, iteration]
        del by_sender[sender]
        if not by_sender:
            del self._told[source, iteration]

    def known(self, source: Source, iteration: int) -> Told | None:
        """What a source brings to an iteration, whoever has passed it on: of the lowest rank."""
        by_sender = self._told.get((source, iteration))
        return by_sender[min(by_sender)] if by_sender else None

    def means(self, iteration: int) -> Iterator[tuple[Rank, Told]]:
        """Means of sites, and who has sent them here."""
        sources = (of for of, at in self._told if of < 0 and at == iteration)
        for source in sorted(sources):
            yield from sorted(self._told[source, iteration].items(), key=lambda one: one[0])

    def forget_before(self, iteration: int) -> None:
        """Drops what is of earlier iterations."""
        for (source, sender), kept in self._kept.items():
            for at in [at for at in kept if at < iteration]:
                self._drop(source, sender, at)

"""Folding together after a split: replicas that trained apart meet at their mean by samples.

Called by `building` around a machine whose workers all exchange with all. While a link is down its
two ends train on without each other; their weights move apart, and gradients that are exchanged
afterwards do not bring them together again. So each worker counts, for every worker, the samples
that its own weights hold (a version vector). When a peer comes back both say what they hold. Who
lacks some of it asks the lowest rank that has it for its weights, and goes to

    (m1 w1 + m2 w2) / (m1 + m2),

m1 the samples that it holds and the other does not, m2 the other way round, both as of when it
asked: what it trains on while the weights are on their way stays whole. From then on it holds both,
says so to all who may lack some, and folds nothing of it again. One that held still (m1 = 0) takes
the other's weights. What the exchange of gradients makes up for by itself, less than
`least_samples`, moves no weights.

The side that is behind also takes up at the iteration where the other is: far apart neither would
ever count on the other again.

Any order of messages, repeated ones and a second cut in the middle lead two groups of equal
replicas to the same weights. Three groups that meet at one moment meet at a mean too, but not
always at the one by samples: who folds with a group that has folded already cannot tell whose part
is whose.

Source: the project's definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import AnyCoding, decode_weights, encode_weights
from dlion_worker.policies.held import MOST_SAMPLES, Held, decode_held, encode_held, lacking
from dlion_worker.policies.interface import (
    Event,
    Fold,
    Instruction,
    IterationPassed,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    Refuse,
    ReplicaView,
    Send,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dlion_worker.policies.interface import Flat, Machine, Value

_KINDS = frozenset({MessageKind.HELD, MessageKind.FOLD_REQUEST, MessageKind.FOLD})
_STEPS = frozenset({MessageKind.GRADIENT, MessageKind.PROGRESS})
LARGEST_LEAP = 1_000_000
"""Iterations: a peer that says that it is further ahead is not followed."""

LEVEL_STEPS = 2
"""After so many steps at whose end a peer was not ahead the two are level again."""

_HELD, _STEP_OF = "held_samples_", "held_iteration_"
"""Before a rank, in a checkpoint."""

HELD = (_HELD, _STEP_OF)
"""Of a checkpoint, where weights are taken over: less than they hold. The rest peers tell."""


class FoldingMachine:
    """A `Machine` that passes everything on to another, and folds beside it."""

    def __init__(
        self,
        machine: Machine,
        replica: ReplicaView,
        *,
        rank: Rank,
        ranks: Collection[int],
        size: int,
        coding: AnyCoding,
        least_samples: int,
        slack: int | None,
        folding: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`ranks` are all that may ever take part; `size` is D, and weights are sent in `coding`.
        `slack`: how far a peer may be behind without being waited for; None: any.
        `folding(True)`: another side's weights are asked for; `folding(False)`: these have met
        them, or will not."""
        self._machine = machine
        self._replica = replica
        self._rank = rank
        self._ranks = ranks
        self._size = size
        self._coding = coding
        self._least_samples = least_samples
        self._slack = slack
        self._folding = folding
        self._held: Held = {}
        self._heard: dict[Rank, int] = {}
        """The last iteration of each worker that `_held` counts."""
        self._said: dict[Rank, Held] = {}
        """What each linked peer has said last that it holds."""
        self._linked: set[Rank] = set()
        self._iteration = 0
        self._stepped = False
        self._finished: dict[Rank, int] = {}
        """The last iteration that each linked peer is known to have done."""
        self._met: dict[Rank, int] = {}
        """Peers that trained apart, each with the level steps after which it is not followed."""
        self._asked: Rank | None = None
        self._held_asking: Held = {}
        """What was held here then: of samples that both have taken since neither lacks any."""
        self._weights_asking_D: Flat | None = None
        self._answerable: set[Rank] = set()
        """Peers that have been told what is held here and have not asked for it since."""

    @property
    def held(self) -> Held:
        """Samples of each worker that this worker's weights hold."""
        return dict(self._held)

    # ---- Machine -------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        """Takes one event; what is to be done about it, in order."""
        match event:
            case MessageArrived(sender=sender, message=message) if message.kind in _KINDS:
                return self._taken(sender, message)
            case MessageArrived(sender=sender, message=message) if message.kind in _STEPS:
                told = self._machine.handle(event)
                if not any(isinstance(one, Refuse) for one in told):
                    self._count(sender, message.iteration, message.local_batch_size)
                    self._place(sender, message.iteration)
                return told
            case LocalStepDone():
                told = self._machine.handle(event)
                self._stepped = True
                self._stepped_to(event.iteration)
                self._count(self._rank, event.iteration, event.local_batch_size)
                return told
            case IterationPassed(iteration=iteration):
                told = self._machine.handle(event)
                self._stepped = True
                self._stepped_to(iteration)
                return told
            case MemberJoined(rank=rank, iteration=iteration):
                return self._machine.handle(event) + self._joined(rank, iteration)
            case MemberLeft(rank=rank):
                return self._machine.handle(event) + self._left(rank)
        return self._machine.handle(event)

    def waiting_for(self) -> frozenset[Rank]:
        """Whom the other machine waits for: folding waits for nobody."""
        return self._machine.waiting_for()

    def next_iteration(self) -> int:
        """The other machine's; but where a peer that came back has done that one already, and as
        many more as need no waiting for, the one after that peer's."""
        usual = self._machine.next_iteration()
        if self._slack is None:
            return usual
        ahead = [
            at
            for at in (self._finished[peer] for peer in self._met)
            if usual + self._slack <= at <= usual + LARGEST_LEAP
        ]
        return max(ahead) + 1 if ahead else usual

    def state(self) -> dict[str, Value]:
        """The other machine's, and what the weights hold."""
        return {
            **self._machine.state(),
            **{f"{_HELD}{rank}": samples for rank, samples in self._held.items()},
            **{f"{_STEP_OF}{rank}": iteration for rank, iteration in self._heard.items()},
        }

    def restore(self, state: Mapping[str, Value]) -> None:
        """Takes back what `state` gave; before any other event."""
        self._machine.restore(state)
        self._held = _by_rank(state, _HELD)
        self._heard = _by_rank(state, _STEP_OF)

    # ---- what is held --------------------------------------------------------------------------

    def _count(self, rank: Rank, iteration: int, samples: int) -> None:
        if samples and iteration > self._heard.get(rank, 0):
            self._heard[rank] = iteration
            self._held[rank] = min(self._held.get(rank, 0) + samples, MOST_SAMPLES)

    def _hold_with(self, others: Mapping[Rank, int]) -> None:
        for rank, samples in others.items():
            self._held[rank] = max(samples, self._held.get(rank, 0))

    def _hold_besides(self, others: Mapping[Rank, int], then: Held) -> None:
        """What others hold, and where that is more than is under way at any time, what has been
        counted since `then` was held besides."""
        for rank, samples in others.items():
            before, now = then.get(rank, 0), self._held.get(rank, 0)
            is_missed = (samples - before) * len(others) >= self._least_samples
            since = now - before if is_missed else 0
            self._held[rank] = min(max(samples + since, now), MOST_SAMPLES)

    def _place(self, peer: Rank, iteration: int) -> None:
        """That peer has done that iteration."""
        self._finished[peer] = max(iteration, self._finished.get(peer, 0))

    def _stepped_to(self, iteration: int) -> None:
        """A peer that counts on this worker is no further than that before it has heard of it."""
        self._iteration = iteration
        for peer, left in list(self._met.items()):
            if self._slack is not None and self._finished[peer] > iteration + self._slack:
                self._met[peer] = LEVEL_STEPS
            elif left > 1:
                self._met[peer] = left - 1
            else:
                del self._met[peer]

    # ---- peers ---------------------------------------------------------------------------------

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        """One that comes while this worker trains: they may have trained apart."""
        self._linked.add(rank)
        self._finished[rank] = iteration
        return [self._tell(rank)] if self._stepped else []

    def _left(self, rank: Rank) -> list[Instruction]:
        self._linked.discard(rank)
        self._met.pop(rank, None)
        self._finished.pop(rank, None)
        self._said.pop(rank, None)
        self._answerable.discard(rank)
        if self._asked == rank:
            self._over()
        return self._ask()

    def _over(self) -> None:
        self._asked = self._weights_asking_D = None
        self._folding(False)

    def _tell(self, peer: Rank) -> Send:
        self._answerable.add(peer)
        return Send(
            peer, Message(MessageKind.HELD, self._iteration, payload=encode_held(self._held))
        )

    def _ask(self) -> list[Instruction]:
        """The lowest rank that holds enough that is lacking here, one at a time."""
        if self._asked is not None or not self._stepped:
            return []
        for peer in sorted(self._said):
            if lacking(self._held, self._said[peer]) >= self._least_samples:
                self._asked, self._held_asking = peer, dict(self._held)
                self._weights_asking_D = self._replica.weights_D.copy()
                self._folding(True)
                return [Send(peer, Message(MessageKind.FOLD_REQUEST, self._iteration))]
        return []

    # ---- messages ------------------------------------------------------------------------------

    def _taken(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender == self._rank or sender not in self._ranks:
            return [Refuse(sender, f"{message.kind.name} from worker {sender}: not of this run")]
        try:
            match message.kind:
                case MessageKind.HELD:
                    return self._told(sender, message)
                case MessageKind.FOLD_REQUEST:
                    return self._requested(sender)
                case _:
                    return self._fold(sender, message)
        except ContractError as error:
            return [Refuse(sender, str(error))]

    def _told(self, sender: Rank, message: Message) -> list[Instruction]:
        said, rest = decode_held(message.payload, self._ranks)
        if rest.nbytes:
            raise ContractError(f"HELD with {rest.nbytes} bytes too many")
        if not self._stepped:  # it begins from weights of a peer, or from those of the beginning
            self._hold_with(said)
            return []
        if sender not in self._linked:
            return []  # the link has gone since
        self._said[sender] = said
        self._met[sender] = LEVEL_STEPS
        self._place(sender, message.iteration)
        return self._ask()

    def _requested(self, sender: Rank) -> list[Instruction]:
        """Once for each time that it was told what is held here."""
        if sender not in self._answerable:
            return []
        self._answerable.discard(sender)
        weights = encode_weights(self._replica.weights_D, self._coding)
        payload = b"".join((encode_held(self._held), weights))
        return [Send(sender, Message(MessageKind.FOLD, self._iteration, payload=payload))]

    def _fold(self, sender: Rank, message: Message) -> list[Instruction]:
        if self._asked != sender:
            return []  # it came too late, or again
        self._said.pop(sender, None)
        then, then_D = self._held_asking, self._weights_asking_D
        self._over()
        theirs, coded = decode_held(message.payload, self._ranks)
        others_D = decode_weights(coded, self._size)
        if then_D is None or not lacking(then, theirs):
            return self._ask()
        meeting = Fold(others_D, lacking(theirs, then), lacking(then, theirs), sender, then_D)
        self._hold_besides(theirs, then)
        return [
            meeting,
            *(self._tell(peer) for peer in sorted(self._linked) if self._has_news_for(peer)),
            *self._ask(),
        ]

    def _has_news_for(self, peer: Rank) -> bool:
        return lacking(self._said.get(peer, {}), self._held) >= self._least_samples


def _by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, int]:
    return {
        Rank(int(name.removeprefix(prefix))): int(value)
        for name, value in state.items()
        if name.startswith(prefix)
    }

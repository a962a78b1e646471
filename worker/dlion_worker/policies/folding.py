"""Folding together after a split: replicas that trained apart meet at their mean by samples.

Called by `building` around a machine whose workers all exchange with all. While a link is down its
two ends train on without each other; their weights move apart, and gradients that are exchanged
afterwards do not bring them together again. So each worker counts, for every worker, the samples
that its own weights hold (a version vector). When a peer comes back both say what they hold. Who
lacks some of it asks all what they hold now, then one that has it for its weights, and goes to

    (m1 w1 + m2 w2) / (m1 + m2),

m1 the samples that it holds and the other does not, m2 the other way round, both as of when it
asked, in lock step of after the same iteration: what it trains on while the weights are on their
way stays whole. Weights are told as where they come to rest, so that moments, which carry on what
each has trained on, need not be. From then on it holds both and says so to all who may lack some.
Less than `least_samples` counts for nothing: the exchange of gradients makes up for it by itself.

So one that held still (m1 = 0) takes the other's weights; and so do two whose link was cut where a
third was linked with both all the time. It holds what either has trained on, and who lacks least of
what is held here is asked. A mean of the two would halve what each has trained on, and leave them
apart from the third, who has it whole.

The side that is behind also takes up at the iteration where the other is: far apart neither would
ever count on the other again.

Any order of messages, repeated ones and a second cut in the middle lead two groups of equal
replicas to the same weights. Three that meet at one moment meet at a mean, but not always by
samples: who folds with a group that has folded already cannot tell whose part is whose.

Source: the project's definition.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_worker.codecs import AnyCoding, decode_weights, encode_weights
from dlion_worker.policies.asking import (
    ANSWER_STEPS,
    LOOSE_ANSWER_STEPS,
    MOST_MOMENTS,
    Asked,
    Inquiry,
    Moment,
    Said,
)
from dlion_worker.policies.held import MOST_SAMPLES, Held, decode_held, encode_held, lacking
from dlion_worker.policies.interface import (
    Descended,
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
from dlion_worker.policies.leveling import Leveling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from dlion_worker.policies.interface import Machine, Value

_KINDS = frozenset(
    {MessageKind.HELD, MessageKind.HELD_REQUEST, MessageKind.FOLD_REQUEST, MessageKind.FOLD}
)
_STEPS = frozenset({MessageKind.GRADIENT, MessageKind.PROGRESS})
MOST_ANSWERS, MOST_GIVEN = 8, 2
"""Between two steps: how often peers are asked and told what is held, and get these weights."""

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
        self._said: dict[Rank, Said] = {}
        """What each linked peer has said last that it holds."""
        self._linked: set[Rank] = set()
        self._iteration = 0
        self._made = 0
        """The last iteration whose update these weights hold."""
        self._stepped = False
        self._leveling = Leveling(slack)
        self._inquiry: Inquiry | None = None
        self._since_step: Counter[tuple[MessageKind, Rank]] = Counter()
        """How often each has been sent what since the last step; this worker: has asked all."""
        self._asked: Asked | None = None
        self._owed: dict[Rank, int] = {}
        """Peers that have asked for these weights, of that iteration or a later one."""
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
                    self._leveling.done(sender, message.iteration)
                return told
            case LocalStepDone():
                told = self._machine.handle(event)
                self._stepped = True
                self._count(self._rank, event.iteration, event.local_batch_size)
                return told + self._stepped_to(event.iteration)
            case IterationPassed(iteration=iteration):
                told = self._machine.handle(event)
                self._stepped = True
                return told + self._stepped_to(iteration)
            case MemberJoined(rank=rank, iteration=iteration):
                return self._machine.handle(event) + self._joined(rank, iteration)
            case Descended():
                self._made = self._iteration
                self._remember()
                return self._machine.handle(event) + self._owed_now() + self._answer_now()
            case MemberLeft(rank=rank):
                return self._machine.handle(event) + self._left(rank)
        return self._machine.handle(event)

    def waiting_for(self) -> frozenset[Rank]:
        """Whom the other machine waits for: folding waits for nobody."""
        return self._machine.waiting_for()

    def next_iteration(self) -> int:
        """The other machine's, or where a peer that came back is; not while weights are under way,
        which do not make up for what is left out then."""
        usual = self._machine.next_iteration()
        return usual if self._asked else self._leveling.next_iteration(usual)

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
        self._iteration = self._made = int(state["iteration"])
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

    def _stepped_to(self, iteration: int) -> list[Instruction]:
        self._iteration = iteration
        self._leveling.stepped(iteration)
        self._since_step.clear()
        return self._ask() if self._inquiry is None or self._inquiry.stepped() else []

    # ---- peers ---------------------------------------------------------------------------------

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        """One that comes while this worker trains: they may have trained apart."""
        self._linked.add(rank)
        self._leveling.joined(rank, iteration, trains=self._stepped)
        return [self._tell(rank)] if self._stepped else []

    def _left(self, rank: Rank) -> list[Instruction]:
        self._linked.discard(rank)
        self._leveling.left(rank)
        self._said.pop(rank, None)
        for kind in _KINDS:
            del self._since_step[kind, rank]
        self._answerable.discard(rank)
        self._owed.pop(rank, None)
        if self._inquiry is not None:
            self._inquiry.awaited.discard(rank)
        if self._asked is not None and self._asked.peer == rank:
            self._over()
        return self._ask()

    def _over(self) -> None:
        self._asked = None
        self._folding(False)

    def _tell(self, peer: Rank) -> Send:
        self._answerable.add(peer)
        return Send(
            peer, Message(MessageKind.HELD, self._iteration, payload=encode_held(self._held))
        )

    def _ask(self) -> list[Instruction]:
        """One of those that hold enough that is lacking here, once all have said what they hold."""
        if self._asked is not None or not self._stepped:
            return []
        least = self._least_samples
        missed = [peer for peer in sorted(self._said) if self._said[peer].missed >= least]
        if not missed:
            self._inquiry = None
            return []
        if self._inquiry is None:
            if not self._may(MessageKind.HELD_REQUEST, self._rank, MOST_ANSWERS):
                return []
            steps = ANSWER_STEPS if self._slack == 0 else LOOSE_ANSWER_STEPS
            self._inquiry = Inquiry(self._linked - set(missed), steps)
            request = Message(MessageKind.HELD_REQUEST, self._iteration)
            questions: list[Instruction] = [
                Send(peer, request) for peer in sorted(self._inquiry.awaited)
            ]
            if questions:
                return questions
        if self._inquiry.awaited:
            return []
        self._inquiry = None
        peer = min(missed, key=lambda one: self._said[one].lost)
        self._asked = Asked(peer)
        self._remember()
        self._folding(True)
        return [Send(peer, Message(MessageKind.FOLD_REQUEST, self._made))]

    def _remember(self) -> None:
        most = MOST_MOMENTS if self._slack == 0 else 1
        if self._asked is not None and self._asked.wants(self._made, most):
            self._asked.moments[self._made] = Moment(dict(self._held), self._replica.resting_D)

    def _compared(self, held: Held) -> Said:
        return Said(held, lacking(self._held, held), lacking(held, self._held))

    # ---- messages ------------------------------------------------------------------------------

    def _taken(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender == self._rank or sender not in self._ranks:
            return [Refuse(sender, f"{message.kind.name} from worker {sender}: not of this run")]
        try:
            match message.kind:
                case MessageKind.HELD:
                    return self._told(sender, message)
                case MessageKind.HELD_REQUEST:
                    return self._answered(sender)
                case MessageKind.FOLD_REQUEST:
                    return self._requested(sender, message)
                case _:
                    return self._fold(sender, message)
        except ContractError as error:
            return [Refuse(sender, str(error)), *self._ask()]

    def _told(self, sender: Rank, message: Message) -> list[Instruction]:
        said, rest = decode_held(message.payload, self._ranks)
        if rest.nbytes:
            raise ContractError(f"HELD with {rest.nbytes} bytes too many")
        if not self._stepped:  # it begins from weights of a peer, or from those of the beginning
            self._hold_with(said)
            return []
        if sender not in self._linked:
            return []  # the link has gone since
        self._said[sender] = self._compared(said)
        self._leveling.done(sender, message.iteration)
        self._leveling.told(sender)
        if self._inquiry is not None:
            self._inquiry.awaited.discard(sender)
        return self._ask()

    def _answered(self, sender: Rank) -> list[Instruction]:
        if not self._stepped or sender not in self._linked:
            return []
        return [self._tell(sender)] if self._may(MessageKind.HELD, sender, MOST_ANSWERS) else []

    def _may(self, kind: MessageKind, peer: Rank, most: int) -> bool:
        self._since_step[kind, peer] += 1
        return self._since_step[kind, peer] <= most

    def _requested(self, sender: Rank, message: Message) -> list[Instruction]:
        """Once for each time that it was told what is held here. Where iterations are common to
        all, the update that its weights hold and these do not is waited for."""
        if sender not in self._answerable or not self._may(MessageKind.FOLD, sender, MOST_GIVEN):
            return []
        self._answerable.discard(sender)
        if self._slack == 0 and message.iteration == self._made + 1:
            self._owed[sender] = message.iteration
            return []
        return [self._weights(sender)]

    def _owed_now(self) -> list[Instruction]:
        due = [peer for peer, iteration in self._owed.items() if iteration <= self._made]
        for peer in due:
            del self._owed[peer]
        return [self._weights(peer) for peer in due]

    def _answer_now(self) -> list[Instruction]:
        asked = self._asked
        if asked is None or asked.early is None or asked.early.iteration > self._made:
            return []
        return self._taken(asked.peer, asked.early)

    def _weights(self, peer: Rank) -> Send:
        weights = encode_weights(self._replica.resting_D, self._coding)
        payload = b"".join((encode_held(self._held), weights))
        return Send(peer, Message(MessageKind.FOLD, self._made, payload=payload))

    def _fold(self, sender: Rank, message: Message) -> list[Instruction]:
        asked = self._asked
        if asked is None or asked.peer != sender:
            return []  # it came too late, or again
        if self._slack == 0 and message.iteration == self._made + 1:
            asked.early = message
            return []
        self._said.pop(sender, None)
        self._over()
        theirs, coded = decode_held(message.payload, self._ranks)
        others_D = decode_weights(coded, self._size)
        moment = asked.after(message.iteration)
        then, then_D = moment.held, moment.resting_D
        if not lacking(then, theirs):
            return self._ask()
        own = lacking(theirs, then)
        own = own if own >= self._least_samples else 0
        meeting = Fold(others_D, own, lacking(then, theirs), sender, then_D)
        self._hold_besides(theirs, then)
        self._said = {peer: self._compared(one.held) for peer, one in self._said.items()}
        return [
            meeting,
            *(self._tell(peer) for peer in sorted(self._linked) if self._has_news_for(peer)),
            *self._ask(),  # asks all first, never for weights before the fold is carried out
        ]

    def _has_news_for(self, peer: Rank) -> bool:
        known = self._said[peer].held if peer in self._said else {}
        return lacking(known, self._held) >= self._least_samples


def _by_rank(state: Mapping[str, Value], prefix: str) -> dict[Rank, int]:
    return {
        Rank(int(name.removeprefix(prefix))): int(value)
        for name, value in state.items()
        if name.startswith(prefix)
    }

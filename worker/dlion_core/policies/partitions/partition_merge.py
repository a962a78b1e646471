"""Merge replicas that trained apart after a network partition.

Called by `factory`, around a machine in which all workers exchange with all. While a link is down
its two ends diverge, and later gradients do not bring them together. So each worker counts the
samples of every worker that its weights contain (a version vector).

When a peer returns, both send their vectors (`HELD`). A worker that misses samples asks all peers
for their vectors, then pulls the weights of one that has these samples. It moves its weights to

    (m1 w1 + m2 w2) / (m1 + m2).

m1 is the number of samples that only this worker has, m2 that only the peer has. Both refer to the
time of the request; in lock step, to the same iteration. What this worker trains on while the
weights travel is kept in full. Both sides use resting weights (`ReplicaView.resting_D`), so
optimizer moments are unaffected. After a merge the worker sends its vector to the peers that miss
samples. Differences below `min_samples` are ignored: the exchange of gradients compensates for
them.

A worker that did not train (m1 = 0) therefore takes over the peer's weights. So do two workers with
a broken link and a common third peer that was linked with both. The peer that misses least of the
local samples is asked, which is the third. A mean of the two would halve what each has trained on,
and both would differ from the third.

The side that is behind continues at the other side's iteration (`iteration_alignment`).

Two groups of equal replicas reach the same weights under any message order, repetition or second
partition. Three groups that merge at once reach a mean, but not always the sample-weighted one: a
merged group cannot separate its parts.

Source: the project's definition.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_core.codecs import decode_weights, encode_weights
from dlion_core.policies.claims.magnitudes import check_weights
from dlion_core.policies.claims.samples import check_vector
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    STEP_KINDS,
    Event,
    Instruction,
    IterationReplayed,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    MergeReplicas,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    ReplicaView,
    SendMessage,
    UpdateApplied,
    Value,
)
from dlion_core.policies.partitions.iteration_alignment import IterationAlignment
from dlion_core.policies.partitions.pending_pulls import (
    ANSWER_TIMEOUT_STEPS,
    LOOSE_ANSWER_TIMEOUT_STEPS,
    MAX_SNAPSHOTS,
    PeerVector,
    PendingPull,
    PullSnapshot,
    VectorQuery,
)
from dlion_core.policies.partitions.version_vector import (
    SampleCounter,
    VersionVector,
    decode_version_vector,
    encode_version_vector,
    missing_samples,
)
from dlion_core.policies.peer_machine import PeerMachine

_KINDS = frozenset(
    {MessageKind.HELD, MessageKind.HELD_REQUEST, MessageKind.FOLD_REQUEST, MessageKind.FOLD}
)
# Limits between two steps: queries and version vectors per peer, and weights per peer.
MAX_VECTORS_PER_STEP, MAX_WEIGHTS_PER_STEP = 8, 2
MAX_UNBOUNDED_LEAD = 100_000
"""Iterations between two workers of a side that never wait for each other."""


class PartitionMerge:
    """A `PolicyMachine` that wraps another one and merges partitions."""

    def __init__(
        self,
        machine: PolicyMachine,
        context: PolicyContext,
        replica: ReplicaView,
        *,
        min_samples: int,
        slack: int | None,
        on_merging: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`slack`: iterations that a peer may be behind without being waited for; None: any number.
        `on_merging(True)` is called when a peer's weights are requested, `on_merging(False)` when
        the merge is done or has failed."""
        self._machine, self._replica = machine, replica
        self._rank, self._size, self._coding = context.rank, context.layout.size, context.coding
        self._ranks, self._spec = context.possible_ranks, context.spec
        self._min_samples = min_samples
        self._slack = slack
        self._on_merging = on_merging
        self._samples = SampleCounter()
        self._vectors: dict[Rank, PeerVector] = {}
        """The latest version vector of each linked peer."""
        self._linked: set[Rank] = set()
        self._iteration = 0
        self._applied = 0
        """The last iteration whose update these weights contain."""
        self._stepped = False
        self._alignment = IterationAlignment(slack)
        self._query: VectorQuery | None = None
        self._since_step: Counter[tuple[MessageKind, Rank]] = Counter()
        """Messages sent since the last step, by kind and peer. Own rank: queries sent to all."""
        self._pull: PendingPull | None = None
        self._owed: dict[Rank, int] = {}
        """Peers that requested these weights as of that iteration or a later one."""
        self._answerable: set[Rank] = set()
        """Peers that were sent the version vector and have not requested weights since."""

    @property
    def held(self) -> VersionVector:
        return dict(self._samples.held)

    @property
    def max_lead(self) -> int | None:
        """Return what the wrapped machine has; None: any number."""
        return self._machine.max_lead if isinstance(self._machine, PeerMachine) else None

    # ---- Machine ---------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case MessageArrived(sender=sender, message=message) if message.kind in _KINDS:
                return self._handle_merge_message(sender, message)
            case MessageArrived(sender=sender, message=message) if message.kind in STEP_KINDS:
                instructions = self._machine.handle(event)
                if not any(isinstance(one, RejectMessage) for one in instructions):
                    self._samples.count(sender, message.iteration, message.local_batch_size)
                    self._alignment.step_finished(sender, message.iteration)
                return instructions
            case LocalStepDone():
                instructions = self._machine.handle(event)
                self._stepped = True
                self._samples.count(self._rank, event.iteration, event.local_batch_size)
                return instructions + self._stepped_to(event.iteration)
            case IterationReplayed(iteration=iteration):
                instructions = self._machine.handle(event)
                self._stepped = True
                return instructions + self._stepped_to(iteration)
            case MemberJoined(rank=rank, iteration=iteration):
                return self._machine.handle(event) + self._joined(rank, iteration)
            case UpdateApplied():
                self._applied = self._iteration
                self._take_snapshot()
                instructions = self._machine.handle(event) + self._owed_weights()
                return instructions + self._apply_early_answer()
            case MemberLeft(rank=rank):
                return self._machine.handle(event) + self._left(rank)
        return self._machine.handle(event)

    def waiting_for(self) -> frozenset[Rank]:
        """Return the wrapped machine's peers; merging never blocks a step."""
        return self._machine.waiting_for()

    def next_iteration(self) -> int:
        """Return the next iteration, aligned with a returned peer. Not aligned while a pull is
        pending: its weights do not replace the skipped iterations."""
        usual = self._machine.next_iteration()
        return usual if self._pull else self._alignment.next_iteration(usual)

    def state(self) -> dict[str, Value]:
        return {**self._machine.state(), **self._samples.state()}

    def restore(self, state: Mapping[str, Value]) -> None:
        self._machine.restore(state)
        self._iteration = self._applied = int(state["iteration"])
        self._samples.restore(state)

    def _stepped_to(self, iteration: int) -> list[Instruction]:
        self._iteration = iteration
        self._alignment.stepped(iteration)
        self._since_step.clear()
        return self._request_missing() if self._query is None or self._query.stepped() else []

    # ---- peers -----------------------------------------------------------------------------------

    def _joined(self, rank: Rank, iteration: int) -> list[Instruction]:
        """A peer that joins while this worker trains may have trained separately."""
        self._linked.add(rank)
        self._alignment.joined(rank, iteration, trains=self._stepped)
        return [self._vector_message(rank)] if self._stepped else []

    def _left(self, rank: Rank) -> list[Instruction]:
        self._linked.discard(rank)
        self._alignment.left(rank)
        self._vectors.pop(rank, None)
        for kind in _KINDS:
            del self._since_step[kind, rank]
        self._answerable.discard(rank)
        self._owed.pop(rank, None)
        if self._query is not None:
            self._query.awaited.discard(rank)
        if self._pull is not None and self._pull.peer == rank:
            self._end_pull()
        return self._request_missing()

    def _end_pull(self) -> None:
        self._pull = None
        self._on_merging(False)

    def _vector_message(self, peer: Rank) -> SendMessage:
        self._answerable.add(peer)
        return SendMessage(
            peer,
            Message(MessageKind.HELD, self._iteration, payload=encode_version_vector(self.held)),
        )

    def _request_missing(self) -> list[Instruction]:
        """Request weights from one peer that has missing samples, once all peers sent their
        vectors."""
        if self._pull is not None or not self._stepped:
            return []
        least = self._min_samples
        missed = [peer for peer in sorted(self._vectors) if self._vectors[peer].missed >= least]
        if not missed:
            self._query = None
            return []
        if self._query is None:
            kind = MessageKind.HELD_REQUEST
            if not self._is_within_limit(kind, self._rank, MAX_VECTORS_PER_STEP):
                return []
            steps = ANSWER_TIMEOUT_STEPS if self._slack == 0 else LOOSE_ANSWER_TIMEOUT_STEPS
            self._query = VectorQuery(self._linked - set(missed), steps)
            if self._query.awaited:
                request = Message(kind, self._iteration)
                return [SendMessage(peer, request) for peer in sorted(self._query.awaited)]
        if self._query.awaited:
            return []
        self._query = None
        peer = min(missed, key=lambda one: self._vectors[one].lost)
        self._pull = PendingPull(peer)
        self._take_snapshot()
        self._on_merging(True)
        return [SendMessage(peer, Message(MessageKind.FOLD_REQUEST, self._applied))]

    def _take_snapshot(self) -> None:
        most = MAX_SNAPSHOTS if self._slack == 0 else 1
        if self._pull is not None and self._pull.needs_snapshot(self._applied, most):
            self._pull.snapshots[self._applied] = PullSnapshot(
                dict(self._samples.held), self._replica.resting_D
            )

    def _compared(self, held: VersionVector) -> PeerVector:
        return PeerVector(held, missing_samples(self.held, held), missing_samples(held, self.held))

    # ---- messages --------------------------------------------------------------------------------

    def _handle_merge_message(self, sender: Rank, message: Message) -> list[Instruction]:
        if sender == self._rank or sender not in self._ranks:
            return [
                RejectMessage(sender, f"{message.kind.name} from worker {sender}: not of this run")
            ]
        try:
            match message.kind:
                case MessageKind.HELD:
                    return self._vector_arrived(sender, message)
                case MessageKind.HELD_REQUEST:
                    return self._vector_requested(sender)
                case MessageKind.FOLD_REQUEST:
                    return self._weights_requested(sender, message)
                case _:
                    return self._weights_arrived(sender, message)
        except ContractError as error:
            return [RejectMessage.of(sender, error), *self._request_missing()]

    def _vector_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        vector, rest = decode_version_vector(message.payload, self._ranks)
        if rest.nbytes:
            raise ContractError(f"HELD with {rest.nbytes} extra bytes; allowed: none")
        self._check_vector(vector, message.iteration)
        if not self._stepped:  # it starts from initial weights or those of a peer
            self._samples.include(vector)
            return []
        if sender not in self._linked:
            return []  # the link is down again
        self._vectors[sender] = self._compared(vector)
        self._alignment.step_finished(sender, message.iteration)
        self._alignment.vector_received(sender)
        if self._query is not None:
            self._query.awaited.discard(sender)
        return self._request_missing()

    def _check_vector(self, vector: VersionVector, iteration: int) -> None:
        """Raise CallerError if it has more samples than workers can have made until then."""
        # A worker of the sender's side may be ahead of it.
        lead = MAX_UNBOUNDED_LEAD if self._slack is None else 2 * (self._slack + 1)
        until = max(iteration, self._iteration) + lead
        check_vector(vector, self._samples.most(vector, until, self._spec))

    def _vector_requested(self, sender: Rank) -> list[Instruction]:
        answers = self._stepped and sender in self._linked
        if not (answers and self._is_within_limit(MessageKind.HELD, sender, MAX_VECTORS_PER_STEP)):
            return []
        return [self._vector_message(sender)]

    def _is_within_limit(self, kind: MessageKind, peer: Rank, most: int) -> bool:
        self._since_step[kind, peer] += 1
        return self._since_step[kind, peer] <= most

    def _weights_requested(self, sender: Rank, message: Message) -> list[Instruction]:
        """Answer once per version vector sent. In lock step, wait for the update that the requester
        already has and this worker has not."""
        if sender not in self._answerable or not self._is_within_limit(
            MessageKind.FOLD, sender, MAX_WEIGHTS_PER_STEP
        ):
            return []
        self._answerable.discard(sender)
        if self._slack == 0 and message.iteration == self._applied + 1:
            self._owed[sender] = message.iteration
            return []
        return [self._weights_message(sender)]

    def _owed_weights(self) -> list[Instruction]:
        due = [peer for peer, iteration in self._owed.items() if iteration <= self._applied]
        for peer in due:
            del self._owed[peer]
        return [self._weights_message(peer) for peer in due]

    def _apply_early_answer(self) -> list[Instruction]:
        pull = self._pull
        if pull is None or pull.early_answer is None or pull.early_answer.iteration > self._applied:
            return []
        return self._handle_merge_message(pull.peer, pull.early_answer)

    def _weights_message(self, peer: Rank) -> SendMessage:
        weights = encode_weights(self._replica.resting_D, self._coding)
        payload = b"".join((encode_version_vector(self._samples.held), weights))
        return SendMessage(peer, Message(MessageKind.FOLD, self._applied, payload=payload))

    def _weights_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        pull = self._pull
        if pull is None or pull.peer != sender:
            return []  # too late or repeated
        if self._slack == 0 and message.iteration == self._applied + 1:
            pull.early_answer = message
            return []
        self._vectors.pop(sender, None)
        self._end_pull()
        theirs, coded = decode_version_vector(message.payload, self._ranks)
        self._check_vector(theirs, message.iteration)
        others_D = check_weights(decode_weights(coded, self._size), self._replica.weights_D)
        snapshot = pull.snapshot_after(message.iteration)
        then, then_D = snapshot.held, snapshot.resting_D
        if not missing_samples(then, theirs):
            return self._request_missing()
        own = missing_samples(theirs, then)
        own = own if own >= self._min_samples else 0
        merge = MergeReplicas(others_D, own, missing_samples(then, theirs), sender, then_D)
        self._samples.merge(theirs, then, self._min_samples)
        self._vectors = {peer: self._compared(one.held) for peer, one in self._vectors.items()}
        behind = [peer for peer in sorted(self._linked) if self._lacks_samples(peer)]
        vectors = [self._vector_message(peer) for peer in behind]
        # This queries vectors first: no weights are requested before the merge is done.
        return [merge, *vectors, *self._request_missing()]

    def _lacks_samples(self, peer: Rank) -> bool:
        known = self._vectors[peer].held if peer in self._vectors else {}
        return missing_samples(known, self._samples.held) >= self._min_samples

"""The two machines of policy `staged`.

The *decoder*, the first worker, requests features of each *sensor* in batches. A sensor encodes its
samples in a fixed order, one batch in each step, and sends those that are requested; it waits while
there is no request. It passes over batches that the decoder has, so either may restart anywhere.
The decoder adds what arrives to its own samples and makes local steps on all of them.

Source: hierarchical training with pre-deployed encoders over band-limited links; only title and
claims are known. Requests, coding and the choice of bits are ours.
"""

import struct
from collections.abc import Iterator, Mapping
from math import prod
from typing import Final, Protocol, cast

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec.policies import DECODER
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.interface import (
    AddSamples,
    ApplyGradient,
    BudgetsChanged,
    Event,
    Instruction,
    LocalFeatures,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    RemindAfter,
    ReminderDue,
    ReplicaView,
    ReportEvent,
    SendMessage,
    Value,
)
from dlion_core.policies.round_parameters import StagedParameters
from dlion_core.policies.staged.collection import MAX_REQUESTED, Collection
from dlion_core.policies.staged.feature_batch import (
    BATCH_SAMPLES,
    bits_for,
    decode,
    encode,
    max_collected_bytes,
    max_sensor_values,
)
from dlion_core.policies.state_values import by_rank

_REQUEST: Final = struct.Struct("<I")
MAX_NAMED: Final = 8
"""Sensors that an event names."""
_PAYLOADS, _ENDS = "payloads_", "ends_"


class FeatureReplica(ReplicaView, Protocol):
    """A replica that is trained on features."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def class_count(self) -> int: ...


def staged(context: PolicyContext, parameters: StagedParameters) -> PolicyMachine:
    """Return the machine of that worker."""
    if context.spec.exchange.trains(context.rank):
        return Decoder(context, parameters)
    return Sensor(parameters)


class Sensor:
    """Sends the features that the decoder requests."""

    def __init__(self, parameters: StagedParameters) -> None:
        self._parameters = parameters
        self._iteration = 0
        self._requested: set[int] = set()
        self._bytes_per_s: float | None = None

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case LocalStepDone(iteration=iteration, features=features):
                self._iteration = iteration
                if features is None:
                    raise ValueError("policy staged needs the features of a sensor's step")
                return self._send(features)
            case MessageArrived(sender=sender, message=message):
                try:
                    self._request_arrived(sender, message)
                except ContractError as error:
                    return [RejectMessage.of(sender, error)]
            case MemberJoined() | MemberLeft():
                self._requested.clear()  # the decoder sends new requests
            case BudgetsChanged(bytes_per_s=bytes_per_s):
                self._bytes_per_s = bytes_per_s.get(DECODER)
        return []

    def waiting_for(self) -> frozenset[Rank]:
        return frozenset() if self._requested else frozenset({DECODER})

    def next_iteration(self) -> int:
        return self._iteration + 1

    def _request_arrived(self, sender: Rank, message: Message) -> None:
        if sender != DECODER or message.kind is not MessageKind.FEATURES_REQUEST:
            raise ContractError(f"{message.kind.name} at a sensor; allowed: FEATURES_REQUEST")
        if message.size_bytes != _REQUEST.size:
            raise ContractError(f"request of {message.size_bytes} bytes; allowed: {_REQUEST.size}")
        if len(self._requested) >= MAX_REQUESTED:
            raise ContractError(f"more than {MAX_REQUESTED} requests at once")
        (first,) = _REQUEST.unpack(message.payload)
        self._requested.add(first)

    def _send(self, features: LocalFeatures) -> list[Instruction]:
        known = {first for first in self._requested if _is_start(first, features.total)}
        refused: list[Instruction] = [
            RejectMessage(DECODER, f"features requested from sample {first} on; there are none")
            for first in sorted(self._requested - known)
        ]
        self._requested = known
        if features.first not in known:
            return refused
        known.discard(features.first)
        payload = encode(features, self._bits(features))
        message = Message(MessageKind.FEATURES, self._iteration, payload=payload)
        return [*refused, SendMessage(DECODER, message)]

    def _bits(self, features: LocalFeatures) -> int:
        if self._parameters.bits != "auto":
            return int(self._parameters.bits)
        values = features.total * features.features_B[0].size
        return bits_for(values, self._bytes_per_s, self._parameters.arrive_within)

    def state(self) -> dict[str, Value]:
        return {"iteration": self._iteration}

    def restore(self, state: Mapping[str, Value]) -> None:
        self._iteration = int(state["iteration"])


class Decoder:
    """Collects features, and trains on them."""

    def __init__(self, context: PolicyContext, parameters: StagedParameters) -> None:
        self._context, self._parameters = context, parameters
        self._iteration = 0
        self._has_begun = False
        self._members: set[Rank] = set()
        self._collections: dict[Rank, Collection] = {}
        self._batches = 0
        """Batches of all sensors that have arrived."""

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case LocalStepDone(iteration=iteration):
                self._iteration, self._has_begun = iteration, True
                return [ApplyGradient(event.gradient_D, event.local_batch_size)]
            case MessageArrived(sender=sender, message=message):
                try:
                    return self._features_arrived(sender, message)
                except ContractError as error:
                    return [RejectMessage.of(sender, error)]
            case MemberJoined(rank=rank):
                is_first = not (self._has_begun or self._members)
                timer = [RemindAfter(self._parameters.start_within)] if is_first else []
                self._members.add(rank)
                self._of(rank).forget_requests()
                return [*timer, *self._requests(rank)]
            case MemberLeft(rank=rank):
                self._members.discard(rank)
            case ReminderDue():
                return self._start_anyway()
        return []

    def _start_anyway(self) -> list[Instruction]:
        """Start with the features that are here, and name the sensors that have sent too few."""
        late, self._has_begun = self.waiting_for(), True
        if not late:
            return []
        sent = ", ".join(
            f"worker {rank} has sent {self._of(rank).collected:,} of "
            f"{self._of(rank).total or 'its'} samples"
            for rank in sorted(late)[:MAX_NAMED]
        )
        more = f", and {len(late) - MAX_NAMED} more too few" if len(late) > MAX_NAMED else ""
        text = f"training starts after {self._parameters.start_within:g} s (startWithin): "
        return [ReportEvent(EventReason.FEATURES_AWAITED, f"{text}{sent}{more}")]

    def waiting_for(self) -> frozenset[Rank]:
        """Until enough features are there, the sensors that have sent too few."""
        if self._has_begun:
            return frozenset()
        fraction = self._parameters.start_fraction
        return frozenset(
            rank
            for rank in self._members
            if not (one := self._of(rank)).total or one.collected < fraction * one.total
        )

    def next_iteration(self) -> int:
        return self._iteration + 1

    def _of(self, rank: Rank) -> Collection:
        if rank not in self._collections:
            values = max_sensor_values(self._sensors)
            self._collections[rank] = Collection(values // prod(self._replica.input_shape))
        return self._collections[rank]

    def _requests(self, rank: Rank) -> list[Instruction]:
        return [
            SendMessage(
                rank,
                Message(
                    MessageKind.FEATURES_REQUEST, self._iteration, payload=_REQUEST.pack(first)
                ),
            )
            for first in self._of(rank).next_requests()
        ]

    def _features_arrived(self, sender: Rank, message: Message) -> list[Instruction]:
        if message.kind is not MessageKind.FEATURES or sender not in self._members:
            raise ContractError(f"{message.kind.name} at the decoder; allowed: FEATURES")
        payload, collection = bytes(message.payload), self._of(sender)
        try:
            batch = self._decoded(payload)
            collection.check(batch)
        except ContractError as error:
            collection.refuse(payload)
            return [RejectMessage.of(sender, error), *self._requests(sender)]
        self._add(collection, batch, payload)
        instructions = [_added(sender, batch), *self._requests(sender)]
        if collection.is_complete:
            text = (
                f"the features of {collection.total:,} samples of worker {sender} are here, in "
                f"{collection.wire_bytes:,} bytes"
            )
            instructions.append(ReportEvent(EventReason.FEATURES_COLLECTED, text))
        return instructions

    def _add(self, collection: Collection, batch: LocalFeatures, payload: bytes) -> None:
        collection.add(batch, payload, self._batches)
        self._batches += 1

    @property
    def _replica(self) -> FeatureReplica:
        if self._context.replica is None:
            raise ValueError("policy staged needs the replica")
        return cast("FeatureReplica", self._context.replica)

    def _decoded(self, payload: bytes) -> LocalFeatures:
        return decode(payload, self._replica.input_shape, self._replica.class_count).samples

    @property
    def max_kept_bytes(self) -> int:
        """The most bytes that features take in a checkpoint."""
        return max_collected_bytes(self._replica.input_shape, self._sensors)

    @property
    def _sensors(self) -> int:
        return len(self._context.ranks) - 1

    def collected_samples(self) -> Iterator[AddSamples]:
        """Return the samples of all sensors, in the order in which they arrived.

        Raises ContractError for a checkpoint of other data.
        """
        batches = [
            (number, rank, payload)
            for rank, collection in self._collections.items()
            for number, payload in collection.payloads()
        ]
        for _, rank, payload in sorted(batches):
            yield _added(rank, self._decoded(payload))

    def state(self) -> dict[str, Value]:
        state: dict[str, Value] = {"iteration": self._iteration}
        for rank, collection in self._collections.items():
            kept = collection.state()
            state |= {f"{_PAYLOADS}{rank}": kept["payloads"], f"{_ENDS}{rank}": kept["ends"]}
        return state

    def restore(self, state: Mapping[str, Value]) -> None:
        self._iteration = int(state["iteration"])
        self._has_begun = self._iteration > 0
        self._collections = {}
        ends = by_rank(state, _ENDS)
        for rank, payloads in by_rank(state, _PAYLOADS).items():
            self._of(rank).restore(payloads, ends[rank])
        self._batches = sum(each.batches for each in self._collections.values())


def _is_start(first: int, total: int) -> bool:
    return first < total and first % BATCH_SAMPLES == 0


def _added(sender: Rank, batch: LocalFeatures) -> AddSamples:
    return AddSamples(f"features-{sender}-{batch.first}", batch.features_B, batch.labels_B)

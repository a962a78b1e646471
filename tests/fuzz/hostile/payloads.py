"""Hostile payloads in valid frames: gradients, weights, losses, join messages, peers' states.

They also include any message for the trainer's inbox and the policies. The result must be
`ContractError` (from the policies `RejectMessage`), or finite values at ascending positions of the
model. Afterwards messages of an honest peer are accepted.
"""

from __future__ import annotations

import functools
import itertools
import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.spec import Job, load_job
from dlion_core.codecs import (
    HEADER_BYTES,
    Coding,
    IndexCodec,
    ValueCodec,
    decode_gradient,
    decode_loss,
    decode_weights,
    encode_loss,
    encode_range,
    encode_whole,
)
from dlion_core.codecs.positions import Positions
from dlion_core.lifecycle import join_barrier
from dlion_core.lifecycle.inbox import EventInbox
from dlion_core.links.events import LinkDown, LinkUp
from dlion_core.policies import factory
from dlion_core.policies.interface import (
    ApplyGradient,
    AverageWeights,
    Layout,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    MergeReplicas,
    Message,
    MessageArrived,
    MessageKind,
    PolicyMachine,
    RejectMessage,
    ReplaceWeights,
    UpdateApplied,
)
from dlion_core.policies.partitions.version_vector import encode_version_vector
from dlion_worker.training.snapshot import TrainingState, pack, unpack
from hostile import bending
from naive_codecs import encode_positions, encode_sparse, payload_of

SIZES = (1, 3, 300, 2000)
PEER = Rank(1)
_HEADER = struct.Struct("<BBBBhHII")


@functools.cache
def valid_payloads(size: int) -> tuple[bytes, ...]:
    """Payloads of a model of that size, in every codec and every coding of positions."""
    rng = np.random.default_rng(size)
    made = []
    for codec, indices in itertools.product(ValueCodec, IndexCodec):
        coding = Coding(codec, indices)
        value_D = rng.normal(size=size).astype(np.float32)
        made.append(bytes(encode_whole(value_D, coding)))
        made.append(bytes(encode_range(value_D, size // 3, size, coding)))
        for kept in {1, max(1, size // 100), max(1, size // 20), max(1, size // 3)}:
            index_K = np.sort(rng.choice(size, kept, replace=False))
            made.append(encode_sparse(index_K, value_D[index_K], size, coding))
            varints = encode_positions(Positions.VARINT, index_K, size)
            made.append(payload_of(Positions.VARINT, varints, value_D[index_K], size, coding))
    return tuple(made)


def altered_payload(rng: random.Random, size: int) -> bytes:
    """Return a payload for that size with its header, values or positions altered."""
    valid = rng.choice(valid_payloads(size))
    return bending.until_different(valid, lambda: _altered(rng, valid, size))


def _altered(rng: random.Random, valid: bytes, size: int) -> bytes:
    match rng.randrange(6):
        case 0 | 1:
            fields = list(_HEADER.unpack_from(valid))
            at = rng.randrange(len(fields))
            edges = (0, 1, 2, 3, 4, 5, 6, 7, size - 1, size, size + 1, *bending.NUMBERS)
            width = (8, 8, 8, 8, 16, 16, 32, 32)[at]
            fields[at] = rng.choice(edges) % 2**width
            if at == 4:
                fields[at] = rng.choice((-(2**15), -114, -1, 1, 9, 10, 113, 114, 2**15 - 1))
            return _HEADER.pack(*fields) + valid[HEADER_BYTES:]
        case 2:
            tail = bending.bytes_of(rng, valid[HEADER_BYTES:])
            return valid[:HEADER_BYTES] + tail
        case 3:
            other = rng.choice(valid_payloads(rng.choice(SIZES)))
            return bending.spliced(rng, valid, other)
        case 4:  # positions that descend, repeat or exceed the size: bytes at the end exchanged
            at = rng.randrange(HEADER_BYTES, len(valid))
            return valid[:at] + bytes(sorted(valid[at:], reverse=True))
        case _:
            return bending.bytes_of(rng, valid)


def attack_gradient(rng: random.Random, folder: Path) -> str | None:
    """Decode one hostile gradient, or the same bytes as weights."""
    size = rng.choice(SIZES)
    payload = altered_payload(rng, size)
    try:
        if rng.random() < 0.2:
            weights_D = decode_weights(payload, size)
            assert weights_D.shape == (size,)
            assert np.isfinite(weights_D).all()
            return "taken"
        part = decode_gradient(payload, size)
    except ContractError:
        return "refused"
    assert np.isfinite(part.value_K).all()
    if part.index_K is None:
        assert part.value_K.shape == (size,)
    else:
        places = part.index_K.tolist()
        assert len(places) == part.value_K.size <= size
        assert places == sorted(set(places))
        assert 0 <= places[0] <= places[-1] < size
    return "taken"


def attack_words(rng: random.Random, folder: Path) -> str | None:
    """Decode one hostile loss, join message or state of a peer."""
    what = rng.randrange(3)
    try:
        if what == 0:
            valid = encode_loss(0.5)
            loss = decode_loss(bending.until_different(valid, lambda: bending.bytes_of(rng, valid)))
            assert np.isfinite(loss)
        elif what == 1:
            payload = rng.randbytes(rng.choice((0, 1, 1, 1, 2, 9)))
            if payload == b"\x00":
                return None
            done, asked = rng.choice(bending.LARGE), rng.choice(bending.LARGE)
            message = Message(MessageKind.MEET, done, weights_version=asked, payload=payload)
            answer = join_barrier.parse_message(message)
            assert isinstance(answer, join_barrier.JoinAnswer)
            assert answer.done == message.iteration
            _meet(rng, answer)
        else:
            _unpack(rng)
    except ContractError:
        return "refused"
    return "taken"


def _meet(rng: random.Random, answer: join_barrier.JoinAnswer) -> None:
    """A latecomer names later iterations only a bounded number of times."""
    meeting = join_barrier.JoinBarrier()
    for _ in range(5):
        asked = meeting.peers_to_ask({PEER: rng.randrange(3)}, {PEER: answer})
        assert set(asked) <= {PEER}
        meeting.is_agreed([PEER], {PEER: answer})
    assert meeting.iteration <= answer.done + join_barrier.MAX_MARGIN


def _unpack(rng: random.Random) -> None:
    like = TrainingState(*(np.ones(count, np.float32) for count in (5, 2, 3)))
    valid = pack(like, weights_only=rng.random() < 0.5)
    wrong = bending.until_different(valid, lambda: bending.bytes_of(rng, valid))
    state = unpack(wrong, like, weights_only=rng.random() < 0.5)
    for name, values in vars(state).items():
        assert values.shape == getattr(like, name).shape
        assert np.isfinite(values).all()


def altered_held(rng: random.Random) -> bytes:
    """Return the contents of a peer's weights, valid or altered."""
    valid = encode_version_vector({Rank(0): rng.choice(bending.LARGE), PEER: rng.randrange(10**6)})
    return valid if rng.random() < 0.5 else bending.bytes_of(rng, valid)


def any_message(rng: random.Random, size: int) -> Message:
    """Return a message that valid frames may contain: any kind, any numbers."""
    kind = rng.choice(list(MessageKind))
    if kind is MessageKind.PROGRESS or kind.name.endswith("_REQUEST"):
        payload = b""
    elif kind is MessageKind.HELD:
        payload = altered_held(rng)
    elif kind is MessageKind.FOLD:
        payload = altered_held(rng) + altered_payload(rng, size)
    elif kind in (MessageKind.GRADIENT, MessageKind.WEIGHTS):
        payload = altered_payload(rng, size)
    else:
        payload = rng.randbytes(rng.choice((0, 1, 7, 8, 4096)))
    near = (0, 1, 2, 3, 5, 1000)
    return Message(
        kind,
        iteration=rng.choice((*near, 2**31, 2**53)),
        local_batch_size=rng.choice((*near, 2**31, 2**32 - 1)),
        weights_version=rng.choice(bending.LARGE),
        payload=payload,
    )


def attack_policies(rng: random.Random, folder: Path) -> str | None:
    """Send one hostile message through the trainer's inbox to real policies at a barrier."""
    size, policy = 3, rng.choice(("dlion", "adaptive"))
    spec = _job().spec
    spec = replace(spec, exchange=replace(spec.exchange, policy=policy))
    machine = factory.build(
        spec, Rank(0), Layout(("w",), (size,)), [Rank(0), PEER], replica=_Replica(size)
    )
    sent: list[Message] = []
    inbox = EventInbox(lambda _, message, epoch: sent.append(message), clock_s=lambda: 0.0)
    inbox.put(LinkUp(PEER, 1, 0))
    started = rng.random() < 0.7
    if started:
        for event in inbox.start(0):
            machine.handle(event)
    refused = len(inbox.refusals)
    inbox.put(MessageArrived(PEER, any_message(rng, size)))
    events = inbox.drain()
    instructions = [each for event in events for each in machine.handle(event)]
    for event in [] if started else inbox.start(0):
        instructions += machine.handle(event)
    instructions += machine.handle(LocalStepDone(1, np.ones(size, np.float32), 8, 1.0))
    if policy == "adaptive":  # its round ends
        instructions += machine.handle(UpdateApplied())
    if rng.random() < 0.5:  # it requests weights, and gets this message
        lacked = Message(MessageKind.HELD, 1, payload=encode_version_vector({PEER: 10**6}))
        instructions += machine.handle(MessageArrived(PEER, lacked))
        instructions += machine.handle(MessageArrived(PEER, any_message(rng, size)))
    for instruction in instructions:
        if isinstance(instruction, ApplyGradient):
            assert np.isfinite(instruction.gradient_D).all()
        elif isinstance(instruction, AverageWeights | MergeReplicas | ReplaceWeights):
            assert np.isfinite(instruction.weights_D).all()
    refused = (
        len(inbox.refusals)
        - refused
        + sum(isinstance(each, RejectMessage) for each in instructions)
    )
    _peer_comes_back(inbox, machine, policy)
    return "refused" if refused else "taken"


def _peer_comes_back(inbox: EventInbox, machine: PolicyMachine, policy: str) -> None:
    """The link breaks and opens again: its new life is understood from the beginning."""
    inbox.put(LinkDown(PEER, 1, "hostile"))
    inbox.put(LinkUp(PEER, 2, 0))
    inbox.put(
        MessageArrived(PEER, join_barrier.join_answer(7, done=3, role=join_barrier.JoinRole.IN))
    )
    for event in inbox.drain():
        machine.handle(event)
    assert inbox.answers[PEER] == join_barrier.JoinAnswer(7, 3, join_barrier.JoinRole.IN)
    machine.handle(MemberLeft(PEER))
    machine.handle(MemberJoined(PEER, 0))
    honest = Message(MessageKind.PROGRESS, 1, 8, 1)
    if policy == "dlion":
        gradient = encode_whole(np.ones(3, np.float32), ValueCodec.FLOAT32)
        honest = Message(MessageKind.GRADIENT, 1, 8, 1, gradient)
    instructions = machine.handle(MessageArrived(PEER, honest))
    assert not any(isinstance(each, RejectMessage) for each in instructions)


class _Replica:
    def __init__(self, size: int) -> None:
        self.weights_D = np.ones(size, np.float32)

    @property
    def resting_D(self) -> np.ndarray:  # noqa: N802 - the shape's suffix
        """Return the weights themselves, because there are no moments."""
        return self.weights_D.copy()


@functools.cache
def _job() -> Job:
    groups = [{"name": "small", "workers": 2}]
    trainer = {
        "program": {"builtin": "digits"},
        "dataset": {"name": "digits"},
        "stop": {"maxSteps": 9},
    }
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "hostile"},
            "spec": {
                "sites": [{"name": "plant-a", "groups": groups}],
                "synchronization": {"mode": "synchronous"},
                "trainer": trainer,
            },
        }
    )

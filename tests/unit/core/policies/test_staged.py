"""Tests of staged training: features on a link, and the times at which they are sent.

Decoded features are within half a level of the given ones, at any number of bits, also at the
limit. A damaged or hostile payload is refused with the allowed values. The number of bits follows
the link's rate. A decoder gets each sample once from sensors that restart. It waits a bounded
time for enough sensors.

Either machine refuses messages that the other would not send. A refused batch is requested again.
No sensor takes the room of another. A checkpoint restores all features in their order, or is
refused.

Left out: encoding by Keras (tests/unit/worker/training/test_encoding.py); whole jobs
(tests/simulated/test_staged.py).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_core.policies.interface import (
    AddSamples,
    ApplyGradient,
    BudgetsChanged,
    LocalFeatures,
    LocalStepDone,
    MemberJoined,
    MemberLeft,
    Message,
    MessageArrived,
    MessageKind,
    RejectMessage,
    RemindAfter,
    ReminderDue,
    ReportEvent,
    SendMessage,
)
from dlion_core.policies.staged import feature_batch
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES, decode, encode
from dlion_core.policies.staged.machines import Decoder, Sensor
from staged_machines import (
    CLASSES,
    DECODER,
    SENSOR,
    SHAPE,
    TOTAL,
    collect,
    features,
    requested,
    samples,
    staged_machine,
)

NO_GRADIENT = np.zeros(0, np.float32)


def machine(rank: Rank, **parameters: Any) -> Any:
    return staged_machine(rank, **parameters)


@pytest.mark.parametrize("bits", feature_batch.BITS)
@pytest.mark.parametrize("first", [0, 2 * BATCH_SAMPLES])
def test_decoded_features_are_within_half_a_level(bits: int, first: int) -> None:
    given = samples(first)
    batch = decode(encode(given, bits), SHAPE, CLASSES)
    ranges_C = np.ptp(given.features_B.reshape(-1, 3), axis=0)
    errors_BC = np.abs(batch.samples.features_B - given.features_B)
    assert (errors_BC <= 0.501 * ranges_C / (2**bits - 1)).all()
    assert (batch.samples.labels_B == given.labels_B).all()
    assert (batch.samples.first, batch.samples.total, batch.bits) == (first, TOTAL, bits)


def test_equal_values_survive() -> None:
    given = LocalFeatures(0, 3, np.full((3, *SHAPE), 7, np.float32), np.zeros(3, np.int32))
    assert (decode(encode(given, 2), SHAPE, CLASSES).samples.features_B == 7).all()


@pytest.mark.parametrize("bits", feature_batch.BITS)
def test_values_up_to_the_limit_are_accepted_and_none_exceeds_it(bits: int) -> None:
    limit = np.float32(feature_batch.MAX_MAGNITUDE)
    lowest_B = np.linspace(-limit, limit, 50, dtype=np.float32)
    for lowest in lowest_B:
        values = np.full((3, *SHAPE), lowest)
        values[0] = limit
        given = LocalFeatures(0, 3, values, np.zeros(3, np.int32))
        decoded = decode(encode(given, bits), SHAPE, CLASSES).samples.features_B
        assert np.abs(decoded).max() <= limit
        assert decoded == pytest.approx(values)


def header(first: int = 0, total: int = 3, count: int = 3, bits: int = 8) -> bytes:
    return struct.pack("<IIHB", first, total, count, bits)


def body(low: float = 0, step: float = 1, label: int = 0) -> bytes:
    ranges = struct.pack("<6f", low, 0, 0, step, 1, 1)
    return ranges + bytes(3 * 6) + struct.pack("<3H", label, 0, 0)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "0 bytes; allowed: 11 or more"),
        (header() + body() + b"x", "allowed: 59 for 3"),
        (header() + body()[:-1], "allowed: 59 for 3"),
        (header(bits=3) + body(), "3 bits; allowed: 2, 4, 8"),
        (header(total=0, count=0) + body(), "allowed: 1 to"),
        (header(total=2**32 - 1, count=256), "allowed: 1 to 44739242"),
        (header(first=3) + body(), "from sample 3 of 3 on"),
        (header(first=1) + body(), "multiples of 256"),
        (header(count=2) + body(), "features of 2 samples; allowed: 3"),
        (header() + body(low=np.nan), "a range that falls"),
        (header() + body(low=-2e6), "exceeds what is allowed"),
        (header() + body(step=np.inf), "exceeds what is allowed"),
        (header() + body(step=1.0001e6 / 255), "exceeds what is allowed"),
        (header() + body(step=-1), "a range that falls"),
        (header() + body(label=CLASSES), "a label of 5; allowed: 0 to 4"),
    ],
)
def test_a_hostile_payload_is_refused(payload: bytes, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        decode(payload, SHAPE, CLASSES)


def test_a_receiver_has_room_for_the_largest_batch() -> None:
    values = np.zeros((BATCH_SAMPLES, 1, feature_batch.MAX_FEATURES), np.float32)
    payload = encode(LocalFeatures(0, 256, values, np.zeros(256, np.int32)), 8)
    assert len(payload) == feature_batch.MAX_BATCH_BYTES
    with pytest.raises(ValueError, match="features of shape"):
        encode(LocalFeatures(0, 512, np.zeros((257, 1), np.float32), np.zeros(257, np.int32)), 8)


@pytest.mark.parametrize(("rate", "bits"), [(None, 8), (1e6, 8), (40, 4), (20, 2), (0.1, 2)])
def test_the_number_of_bits_follows_the_rate_of_the_link(rate: float | None, bits: int) -> None:
    sensor = machine(SENSOR)
    sensor.handle(request(0))
    sensor.handle(BudgetsChanged({}, bytes_per_s={} if rate is None else {DECODER: rate}))
    (sent,) = sensor.handle(step(sensor, samples()))
    assert decode(sent.message.payload, SHAPE, CLASSES).bits == bits


def request(first: int) -> MessageArrived:
    payload = struct.pack("<I", first)
    return MessageArrived(DECODER, Message(MessageKind.FEATURES_REQUEST, 0, payload=payload))


def step(worker: Any, features: LocalFeatures | None = None) -> LocalStepDone:
    return LocalStepDone(worker.next_iteration(), NO_GRADIENT, 256, 0.0, features=features)


def test_a_decoder_gets_every_sample_once_from_a_sensor_that_restarts() -> None:
    decoder, sensor, at, added = machine(DECODER), machine(SENSOR), 0, list[AddSamples]()
    _, *pending = decoder.handle(MemberJoined(SENSOR))
    assert decoder.waiting_for() == {SENSOR}
    for turn in range(12):
        if turn == 2:  # messages in flight are lost, and the sensor begins with its first sample
            decoder.handle(MemberLeft(SENSOR))
            sensor, at = machine(SENSOR), 0
            _, *pending = decoder.handle(MemberJoined(SENSOR))
        for one in pending:
            assert not sensor.handle(MessageArrived(DECODER, one.message))
        if sensor.waiting_for():
            break
        sent = sensor.handle(step(sensor, samples(at)))
        at = (at + BATCH_SAMPLES) % (3 * BATCH_SAMPLES)
        answers = [decoder.handle(MessageArrived(SENSOR, one.message)) for one in sent]
        added += [one for each in answers for one in each if isinstance(one, AddSamples)]
        pending = [one for each in answers for one in each if isinstance(one, SendMessage)]
    assert [one.key for one in added] == [f"features-1-{first}" for first in (0, 256, 512)]
    assert sum(len(one.y_B) for one in added) == TOTAL
    assert any(isinstance(one, ReportEvent) for one in answers[0])
    assert decoder.waiting_for() == frozenset()
    assert isinstance(decoder.handle(step(decoder))[0], ApplyGradient)

    restored = machine(DECODER)
    restored.restore(decoder.state())
    assert [one.key for one in restored.collected_samples()] == [one.key for one in added]
    assert restored.handle(MemberJoined(SENSOR)) == [], "no sample is missing"


def test_a_decoder_starts_when_enough_features_arrive_or_sensors_leave() -> None:
    decoder = machine(DECODER, startFraction=0.9)
    assert requested(decoder.handle(MemberJoined(SENSOR))) == [0]
    message = Message(MessageKind.FEATURES, 1, payload=encode(samples(), 8))
    decoder.handle(MessageArrived(SENSOR, message))
    assert decoder.waiting_for() == {SENSOR}
    decoder.handle(MemberLeft(SENSOR))
    assert decoder.waiting_for() == frozenset()


def test_a_start_waits_for_late_sensors_a_bounded_time() -> None:
    decoder = machine(DECODER, workers=12, startWithin=7)
    (timer, _) = decoder.handle(MemberJoined(SENSOR))
    assert timer == RemindAfter(7)
    (first,) = requested(decoder.handle(MemberJoined(Rank(2))))
    assert first == 0, "one timer for all sensors"
    decoder.handle(features(samples(0, 10), sender=Rank(2)))
    assert decoder.waiting_for() == {SENSOR}
    (reported,) = decoder.handle(ReminderDue())
    assert isinstance(reported, ReportEvent)
    assert reported.reason is EventReason.FEATURES_AWAITED
    assert "worker 1 has sent 0 of its samples" in reported.text
    assert decoder.waiting_for() == frozenset()
    added, *_ = decoder.handle(features(samples()))
    assert isinstance(added, AddSamples), "late features are used"
    assert decoder.handle(ReminderDue()) == []


def test_of_many_silent_sensors_some_are_named() -> None:
    decoder = machine(DECODER, workers=12)
    for rank in range(1, 12):
        decoder.handle(MemberJoined(Rank(rank)))
    decoder.handle(features(samples(), sender=Rank(1)))
    (reported,) = decoder.handle(ReminderDue())
    assert "worker 1 has sent 256 of 529 samples, worker 2 has sent 0 of its" in reported.text
    assert reported.text.endswith("worker 8 has sent 0 of its samples, and 3 more too few")


@pytest.mark.parametrize(
    ("rank", "message", "words"),
    [
        (DECODER, Message(MessageKind.FEATURES, 1, payload=encode(samples(256), 8)), "not req"),
        (DECODER, Message(MessageKind.GRADIENT, 1, 8), "GRADIENT at the decoder"),
        (SENSOR, Message(MessageKind.FEATURES, 1), "FEATURES at a sensor"),
        (SENSOR, Message(MessageKind.FEATURES_REQUEST, 1, payload=b"123"), "request of 3 bytes"),
    ],
)  # fmt: skip
def test_a_message_that_no_honest_worker_sends_is_rejected(
    rank: Rank, message: Message, words: str
) -> None:
    worker, peer = machine(rank), Rank(1 - rank)
    worker.handle(MemberJoined(peer))
    (rejected,) = worker.handle(MessageArrived(peer, message))
    assert isinstance(rejected, RejectMessage)
    assert words in rejected.reason


def test_a_refused_batch_is_requested_again() -> None:
    decoder = machine(DECODER)
    collect(decoder, [SENSOR], [0])
    damaged = bytearray(features(samples(BATCH_SAMPLES)).message.payload)
    damaged[-1] = 255  # the label of its last sample
    message = Message(MessageKind.FEATURES, 1, payload=bytes(damaged))
    refused, *others = decoder.handle(MessageArrived(SENSOR, message))
    assert isinstance(refused, RejectMessage)
    assert requested(others) == [BATCH_SAMPLES]
    accepted, *_ = decoder.handle(features(samples(BATCH_SAMPLES)))
    assert isinstance(accepted, AddSamples)
    refused, *others = decoder.handle(features(samples(BATCH_SAMPLES)))
    assert isinstance(refused, RejectMessage)
    assert not others, "the decoder has it"


def test_a_sensor_does_not_take_the_room_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_batch, "MAX_TOTAL_VALUES", 4 * 300 * 6)
    decoder, other = machine(DECODER, workers=5), Rank(4)
    for rank, total in ((SENSOR, 301), (other, 300)):
        decoder.handle(MemberJoined(rank))
        first, *_ = decoder.handle(features(samples(0, total), sender=rank))
        assert isinstance(first, RejectMessage if rank == SENSOR else AddSamples)
    assert decoder.max_kept_bytes >= 4 * (300 * 6 + 2 * 300), "at 8 bits, with labels"


def test_a_saved_state_does_not_change_while_more_arrives() -> None:
    decoder, sensors = machine(DECODER, workers=3), [SENSOR, Rank(2)]
    collect(decoder, sensors, [0])
    state = decoder.state()
    before = {name: np.copy(value) for name, value in state.items()}
    collect(decoder, sensors, [1, 2])
    assert all((state[name] == value).all() for name, value in before.items())
    restored = machine(DECODER, workers=3)
    restored.restore(state)
    keys = [one.key for one in restored.collected_samples()]
    assert keys == ["features-1-0", "features-2-0"]
    collect(restored, sensors, [1, 2])
    assert [one.key for one in restored.collected_samples()] == [
        f"features-{rank}-{first}" for first in (0, 256, 512) for rank in (1, 2)
    ], "in the order of arrival"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ends_1", [[0, 0]], "end at 0"),
        ("ends_1", [[10**6, 0]], "end at 1000000"),
        ("ends_1", [5], "ends of features of shape"),
        ("ends_1", [[5, 0]], "5 bytes; allowed: 11"),
        ("payloads_1", header() + header(), "two batches"),
    ],
)
def test_a_state_of_another_kind_is_refused(name: str, value: Any, words: str) -> None:
    decoder = machine(DECODER)
    collect(decoder, [SENSOR], [0])
    state = decoder.state()
    if name == "payloads_1":
        state["ends_1"], value = np.array([[11, 0], [22, 1]]), np.frombuffer(value, np.uint8)
    with pytest.raises(ContractError, match=words):
        machine(DECODER).restore({**state, name: np.asarray(value)})


def test_other_data_after_a_restart_are_rejected() -> None:
    decoder = machine(DECODER)
    decoder.handle(MemberJoined(SENSOR))
    for total, accepted in ((TOTAL, True), (TOTAL + 1, False)):
        given = samples(0 if accepted else BATCH_SAMPLES, total)
        message = Message(MessageKind.FEATURES, 1, payload=encode(given, 8))
        first, *_ = decoder.handle(MessageArrived(SENSOR, message))
        assert isinstance(first, AddSamples if accepted else RejectMessage)


def test_requests_for_nothing_and_too_many_are_rejected() -> None:
    sensor = machine(SENSOR)
    for first in (1, 3 * BATCH_SAMPLES, 2**32 - 1, 0):
        assert sensor.handle(request(first)) == []
    (refused,) = sensor.handle(request(256))
    assert "more than 4 requests" in refused.reason
    *refused, sent = sensor.handle(step(sensor, samples()))
    assert [type(one) for one in refused] == [RejectMessage] * 3
    assert sent.message.kind is MessageKind.FEATURES


def test_the_first_worker_is_the_decoder() -> None:
    assert isinstance(machine(DECODER).machine, Decoder)
    assert isinstance(machine(SENSOR).machine, Sensor)

"""Machines of policy `staged` without processes: a decoder, worker 0, and sensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_core.policies import factory
from dlion_core.policies.interface import (
    Instruction,
    Layout,
    LocalFeatures,
    MemberJoined,
    Message,
    MessageArrived,
    MessageKind,
    SendMessage,
)
from dlion_core.policies.iteration_guard import IterationGuard
from dlion_core.policies.staged.feature_batch import BATCH_SAMPLES, encode
from local_run import job_document

SHAPE, CLASSES, TOTAL = (2, 3), 5, 2 * BATCH_SAMPLES + 17
DECODER, SENSOR = Rank(0), Rank(1)
SIZE = 6
"""The size of the model."""


class FeatureView:
    """The part of a replica that a machine reads."""

    class_count = CLASSES
    weights_D = resting_D = np.zeros(SIZE, np.float32)

    def __init__(self, shape: tuple[int, ...] = SHAPE) -> None:
        self.input_shape = shape


def samples(first: int = 0, total: int = TOTAL, *, shape: tuple[int, ...] = SHAPE) -> LocalFeatures:
    """A batch whose channels have very different ranges."""
    rng = np.random.default_rng(first)
    count = min(BATCH_SAMPLES, total - first)
    scale_C = np.resize([1, 100, 0.01], shape[-1])
    values = rng.normal(0, scale_C, (count, *shape)).astype(np.float32)
    return LocalFeatures(first, total, values, rng.integers(0, CLASSES, count, np.int32))


def staged_machine(
    rank: Rank, *, workers: int = 2, shape: tuple[int, ...] = SHAPE, **parameters: Any
) -> IterationGuard:
    """A worker's machine, as a trainer builds it."""
    exchange = {"policy": "staged", "topology": "staged", "parameters": parameters}
    job = load_job(job_document(workers, exchange=exchange, trainer={"encoder": "e.keras"}))
    ranks = [Rank(number) for number in range(workers)]
    layout = Layout(("w",), (SIZE,))
    return factory.build(job.spec, rank, layout, ranks, replica=FeatureView(shape))  # type: ignore[arg-type]


def features(batch: LocalFeatures, *, sender: Rank = SENSOR, bits: int = 8) -> MessageArrived:
    """The batch as a sensor sends it."""
    message = Message(MessageKind.FEATURES, 1, payload=encode(batch, bits))
    return MessageArrived(sender, message)


def requested(instructions: Iterable[Instruction]) -> list[int]:
    """The first samples of the requested batches."""
    sent = [one.message for one in instructions if isinstance(one, SendMessage)]
    return [struct.unpack("<I", one.payload)[0] for one in sent]


def collect(decoder: IterationGuard, senders: Iterable[Rank], batches: Iterable[int]) -> None:
    """Let sensors join, and send these batches in turn."""
    senders = list(senders)
    for rank in senders:
        decoder.handle(MemberJoined(rank))
    for number in batches:
        for rank in senders:
            shape = decoder.machine._replica.input_shape  # type: ignore[attr-defined]
            decoder.handle(features(samples(number * BATCH_SAMPLES, shape=shape), sender=rank))

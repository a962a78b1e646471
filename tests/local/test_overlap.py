"""Test that a worker exchanges messages while it computes a step.

The threads of the exchange and of gRPC need the interpreter now and then, and TensorFlow does not
hold it. Left out: what a busy core costs either of them (benchmarks/exchange_cost.py).
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from dlion_core.links.events import LinkUp
from dlion_core.policies.interface import Message, MessageArrived, MessageKind
from dlion_operator.pki.authority import CertificateAuthority
from dlion_worker.training.model import FlatModel
from dlion_worker.training.programs import builtin
from linked_workers import PLANT_A, Worker, credentials, identity, introduce

pytestmark = pytest.mark.patient
SAMPLES = 1000
MEGABYTE = 1_000_000


def test_messages_are_sent_and_received_while_a_step_computes() -> None:
    model = FlatModel(builtin("cipher"), input_shape=(32, 32, 3), class_count=10, seed=1)
    rng = np.random.default_rng(1)
    x_B = rng.integers(0, 256, (SAMPLES, 32, 32, 3), dtype=np.uint8)
    y_B = rng.integers(0, 10, SAMPLES).astype(np.int32)
    model.step(x_B, y_B)  # traces it
    authorities = {PLANT_A: CertificateAuthority(PLANT_A)}
    one, other = (Worker(who, credentials(who, authorities)) for who in map(identity, (0, 1)))
    returned_s: list[float] = []
    has_ended = threading.Event()

    def exchange() -> None:
        """Send a message there and one back, repeatedly."""
        payload = os.urandom(MEGABYTE)
        while not has_ended.is_set():
            message = Message(MessageKind.GRADIENT, len(returned_s) + 1, 32, 0, payload)
            for sender, receiver in ((one, other), (other, one)):
                sender.exchange.send(receiver.who.rank, message)
                receiver.wait_for(MessageArrived)
            returned_s.append(time.monotonic())

    peers = threading.Thread(target=exchange)
    try:
        introduce(one, other)
        one.wait_for(LinkUp)
        other.wait_for(LinkUp)
        began_s = time.monotonic()
        peers.start()
        model.step(x_B, y_B)
        step_s = time.monotonic() - began_s
    finally:
        has_ended.set()
        if peers.ident is not None:
            peers.join()
        for worker in (one, other):
            worker.exchange.close()
    within = [at for at in returned_s if at <= began_s + step_s]
    print(f"{len(within)} megabytes there and back within a step of {step_s:.2f} s")
    assert len(within) >= 3

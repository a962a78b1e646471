"""Tests of coding by policies.

Every policy codes its messages with the codec of the manifest. Gradients may use any codec; only
polyline makes weights coarser than float16. The same run twice sends the same bytes. Two workers
round differently. `ako` sends runs.

Left out: the codecs (tests/unit/core/codecs, tests/property/test_codecs.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from dlion_api.names import Rank
from dlion_core.codecs import ValueCodec
from dlion_core.codecs.positions import Positions
from dlion_core.policies.catalogue import BUILT_IN
from dlion_core.policies.interface import Layout, Message, MessageKind, SendMessage
from policy_cluster import spec
from weighing_cluster import WeighingCluster

LAYOUT = Layout(("a", "b"), (300, 500))
NUMBER = {codec: number for number, codec in enumerate(ValueCodec, start=1)}
OWN_FORM = {
    "adaptive",
    "fedat",
    "sparseloco",
    "staged",
}  # these code their messages by a parameter of their own
UPDATES = {"gaia"}  # its weight messages are differences, and rounding errors stay
SERVED = {"halos", "quorum-diloco"}  # changes travel to a server, and its weights back
PARAMETERS = {
    "demo": {"momentum": 0},
    "dgc": {"momentum": 0},
    "halos": {"localSteps": 1},
    "localsgd": {"localSteps": 1},
    "quorum-diloco": {"localSteps": 1},
    "topk": {"share": 0.1},
    "twostep": {"momentum": 0},
}
POLICIES = sorted(set(BUILT_IN) - {"none"} - OWN_FORM)


def exchange(policy: str, codec: str, index_codec: str = "fast") -> dict[str, object]:
    found: dict[str, object] = {
        "policy": policy, "codec": codec, "codecDecimals": 3, "indexCodec": index_codec,
    }  # fmt: skip
    if policy == "dlion-published":
        found["weighting"] = "dlion_ratio"
    if policy in PARAMETERS:
        found["parameters"] = PARAMETERS[policy]
    return found


def sent(policy: str, codec: str, index_codec: str = "fast") -> list[Message]:
    """Return the messages of three steps of two workers."""
    job = spec(exchange=exchange(policy, codec, index_codec))
    cluster = WeighingCluster(job, [4, 4], layout=LAYOUT)
    for _ in range(3):
        for rank in cluster.ranks:
            if cluster.may_step(rank):
                cluster.step(rank)
        cluster.deliver_all()
    instructions = [one for replica in cluster.replicas.values() for one in replica.instructions]
    return [
        one.message for one in instructions if isinstance(one, SendMessage) and one.message.payload
    ]


@pytest.mark.parametrize("codec", list(ValueCodec))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_uses_the_codec_of_the_manifest(policy: str, codec: ValueCodec) -> None:
    of_weights = ValueCodec.FLOAT16
    if codec in (ValueCodec.FLOAT32, ValueCodec.POLYLINE):
        of_weights = codec
    coded = [
        m for m in sent(policy, codec) if m.kind in (MessageKind.GRADIENT, MessageKind.WEIGHTS)
    ]
    assert coded
    for message in coded:
        is_change = policy in SERVED and message.weights_version % 4 in (0, 2)
        is_gradient = message.kind is MessageKind.GRADIENT or policy in UPDATES or is_change
        expected = {NUMBER[codec] if is_gradient else NUMBER[of_weights]}
        if codec is ValueCodec.POLYLINE:  # if this is not longer
            expected.add(NUMBER[ValueCodec.FLOAT32])
        assert message.payload[1] in expected


@pytest.mark.parametrize("policy", ["adacomp", "demo", "dgc", "full", "topk"])
def test_the_same_run_sends_the_same_bytes(policy: str) -> None:
    for codec in (ValueCodec.INT8, ValueCodec.INT4):
        first, second = (sent(policy, codec, "smallest") for _ in range(2))
        assert [bytes(one.payload) for one in first] == [bytes(one.payload) for one in second]


def test_two_workers_round_the_same_gradient_differently() -> None:
    cluster = WeighingCluster(spec(exchange=exchange("full", "int8")), [4, 4], layout=LAYOUT)
    gradient_D = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    for rank in cluster.ranks:
        cluster.step(rank, gradient_D)
    one, other = (
        next(bytes(s.message.payload) for s in cluster.replicas[Rank(rank)].instructions
             if isinstance(s, SendMessage) and s.message.kind is MessageKind.GRADIENT)
        for rank in (0, 1)
    )  # fmt: skip
    assert len(one) == len(other)
    assert one[16:24] == other[16:24]  # scales
    assert one != other


@pytest.mark.parametrize("index_codec", ["fast", "smallest"])
def test_positions_use_the_codec_of_the_manifest(index_codec: str) -> None:
    schemes = {message.payload[2] for message in sent("topk", "float16", index_codec)
               if message.kind is MessageKind.GRADIENT}  # fmt: skip
    assert schemes == {Positions.RICE if index_codec == "smallest" else Positions.BLOCK}


def test_ako_sends_runs() -> None:
    job = spec(exchange=exchange("ako", "float16") | {"parameters": {"partitions": 3}})
    cluster = WeighingCluster(job, [4, 4], layout=LAYOUT)
    cluster.lockstep(3)
    sizes = [
        (one.message.payload[2], len(one.message.payload))
        for one in cluster.replicas[Rank(0)].instructions
        if isinstance(one, SendMessage) and one.message.kind is MessageKind.GRADIENT
    ]
    assert sizes == [(Positions.RANGE, 16 + 2 * length + 4) for length in (266, 267, 267)]

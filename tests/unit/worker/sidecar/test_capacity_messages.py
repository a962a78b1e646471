"""Tests of capacity messages between sidecars.

A capacity is unchanged after encoding. Another run, another rank, an unknown source and impossible
values are refused.

Left out: certificates (tests/local).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank
from dlion_api.protocol.measurements import (
    BatchChoice,
    Capacity,
    CapacitySource,
    GradientNoise,
    Grouping,
)
from dlion_api.wire import measuring_pb2
from dlion_worker.sidecar.capacity_messages import from_wire, to_wire

KEY = JobKey("default", "digits", "1")
NOISE = GradientNoise(-0.5, 90.25, 0.75)
CAPACITY = Capacity(Rank(2), 120.5, 2.0, CapacitySource.QUOTA, 7, 1437, 12, NOISE, 0.25)


GROUPING = Grouping(7, Rank(1), ((0, 2), (1,)), (2, 1))


@pytest.mark.parametrize(
    "capacity",
    [
        CAPACITY,
        replace(CAPACITY, link_bytes_per_s={0: 2.5e6, 1: 1e3}, grouping=GROUPING),
        replace(CAPACITY, batch_choice=BatchChoice(3, Rank(1), 640)),
    ],
)
def test_a_capacity_is_unchanged_after_encoding(capacity: Capacity) -> None:
    wire = to_wire(capacity, KEY, 3)
    again = measuring_pb2.CapacityShare.FromString(wire.SerializeToString())
    assert from_wire(again, KEY, Rank(2)) == capacity
    assert again.incarnation == 3


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 1e16])
def test_a_link_with_an_impossible_rate_is_refused(rate: float) -> None:
    wire = to_wire(replace(CAPACITY, link_bytes_per_s={1: 1e6}), KEY, 3)
    wire.link_bytes_per_s[0] = rate
    with pytest.raises(ContractError):
        from_wire(wire, KEY, Rank(2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "default/digits#2"),
        ("rank", 1),
        ("samples_per_s", math.nan),
        ("samples_per_s", math.inf),
        ("samples_per_s", -1.0),
        ("samples_per_s", 1e12),
        ("window_s", -1.0),
        ("training_set_samples", 2**63),
        ("noise_square", math.nan),
        ("noise_variance", 1e31),
        ("noise_weight", 1.5),
        ("exchange_s", -1.0),
        ("source", "Guess"),
    ],
)
def test_an_invalid_message_is_refused(field: str, value: object) -> None:
    wire = to_wire(CAPACITY, KEY, 3)
    setattr(wire, field, value)
    with pytest.raises(ContractError):
        from_wire(wire, KEY, Rank(2))

"""Messages between sidecars: conversion to and from the wire, and validation. No I/O."""

import math
from dataclasses import asdict

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
from dlion_core.resource_control.budgets import PROBE_BYTES

MAX_SAMPLES_PER_S = 1e9
MAX_TRAINING_SET_SAMPLES = 1e15
MAX_NOISE = 1e30
MAX_BYTES_PER_S = 1e15
PROBE_CHUNK_COUNT = 16
PROBE_CHUNK_BYTES = PROBE_BYTES // PROBE_CHUNK_COUNT
MAX_PROBE_BYTES = 4 * PROBE_BYTES


def to_wire(capacity: Capacity, job: JobKey, incarnation: int) -> measuring_pb2.CapacityShare:
    noise, choice = capacity.noise, capacity.batch_choice
    return measuring_pb2.CapacityShare(
        run=str(job),
        rank=capacity.rank,
        incarnation=incarnation,
        samples_per_s=capacity.samples_per_s,
        window_s=capacity.window_s,
        source=str(capacity.source),
        iteration=capacity.iteration,
        training_set_samples=capacity.training_set_samples,
        own_samples=capacity.own_samples,
        noise_square=0.0 if noise is None else noise.square,
        noise_variance=0.0 if noise is None else noise.variance,
        noise_weight=0.0 if noise is None else noise.weight,
        exchange_s=capacity.exchange_s,
        batch_choice=None if choice is None else measuring_pb2.BatchChoice(**asdict(choice)),
        link_bytes_per_s={int(peer): rate for peer, rate in capacity.link_bytes_per_s.items()},
        grouping=None if capacity.grouping is None else _grouping_to_wire(capacity.grouping),
    )


def from_wire(share: measuring_pb2.CapacityShare, job: JobKey, expected: Rank) -> Capacity:
    """Convert a peer's message.

    Raises: ContractError if it is of another run or worker, or a number is out of range.
    """
    sender = f"sidecar of worker {expected}"
    if share.run != str(job) or share.rank != expected:
        given = f"{share.run[:80]!r} worker {share.rank}"
        raise ContractError(f"{sender}: reports {given}; expected {str(job)!r} worker {expected}")
    for name, value, least, most in (
        ("samples_per_s", share.samples_per_s, 0.0, MAX_SAMPLES_PER_S),
        ("window_s", share.window_s, 0.0, MAX_SAMPLES_PER_S),
        ("training_set_samples", share.training_set_samples, 0.0, MAX_TRAINING_SET_SAMPLES),
        ("own_samples", share.own_samples, 0.0, MAX_TRAINING_SET_SAMPLES),
        ("noise_square", share.noise_square, -MAX_NOISE, MAX_NOISE),
        ("noise_variance", share.noise_variance, -MAX_NOISE, MAX_NOISE),
        ("noise_weight", share.noise_weight, 0.0, 1.0),
        ("exchange_s", share.exchange_s, 0.0, MAX_SAMPLES_PER_S),
    ):
        if not (math.isfinite(value) and least <= value <= most):
            raise ContractError(f"{sender}: {name} {value}; allowed: {least:g} to {most:g}")
    try:
        source = CapacitySource(share.source)
    except ValueError:
        allowed = ", ".join(CapacitySource)
        text = f"{sender}: source {share.source[:40]!r}; allowed: {allowed}"
        raise ContractError(text) from None
    noise = None
    if share.noise_weight:
        noise = GradientNoise(share.noise_square, share.noise_variance, share.noise_weight)
    choice = None  # `GoodputController.take` validates it, since it knows the iteration
    if share.HasField("batch_choice"):
        chosen = share.batch_choice
        choice = BatchChoice(chosen.period, Rank(chosen.decider), chosen.size)
    return Capacity(
        expected,
        share.samples_per_s,
        share.window_s,
        source,
        share.iteration,
        share.training_set_samples,
        share.own_samples,
        noise,
        share.exchange_s,
        choice,
        _rates_from_wire(share, sender),
        _grouping_from_wire(share.grouping) if share.HasField("grouping") else None,
    )


def _rates_from_wire(share: measuring_pb2.CapacityShare, sender: str) -> dict[Rank, float]:
    for peer, rate in share.link_bytes_per_s.items():
        if not 0.0 < rate <= MAX_BYTES_PER_S:  # false for nan as well
            allowed = f"above 0 to {MAX_BYTES_PER_S:g}"
            raise ContractError(f"{sender}: link to {peer}: {rate} bytes/s; allowed: {allowed}")
    return {Rank(peer): rate for peer, rate in sorted(share.link_bytes_per_s.items())}


def _grouping_to_wire(grouping: Grouping) -> measuring_pb2.Grouping:
    pairs = zip(grouping.groups, grouping.gateways, strict=True)
    groups = [measuring_pb2.Group(ranks=group, gateway=gateway) for group, gateway in pairs]
    return measuring_pb2.Grouping(version=grouping.version, decider=grouping.decider, groups=groups)


def _grouping_from_wire(message: measuring_pb2.Grouping) -> Grouping:
    """`GroupingState.take` validates it, since it knows the workers."""
    groups = tuple(tuple(map(Rank, group.ranks)) for group in message.groups)
    gateways = tuple(Rank(group.gateway) for group in message.groups)
    return Grouping(message.version, Rank(message.decider), groups, gateways)

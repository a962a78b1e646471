"""Hostile statements of another site's operator, as bytes.

The result must be `ContractError`, a refusal, or a statement that is passed on unchanged and only
about the sender's own workers. Of a bundle only certificates of authorities are used. Statements of
other sites are still accepted.
"""

from __future__ import annotations

import contextlib
import math
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from dlion_api.errors import ContractError
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, MemberState
from dlion_api.wire import federation_pb2 as wire
from dlion_operator.federation.messages import site_hello, sites_of, statement_of, to_wire
from dlion_operator.federation.refusals import FederationRefusalReason, StreamRefusedError
from dlion_operator.federation.reports import (
    Heartbeat,
    LinksTo,
    ReportedWorkers,
    RunRemoved,
    RunReported,
    SpecFingerprint,
    Statement,
    TrainingFigures,
)
from dlion_operator.federation.state import FederationState
from dlion_operator.kubernetes.wire_parsing import parser, readable
from dlion_operator.pki.authority import CertificateAuthority
from dlion_operator.pki.authority_bundles import parse_authorities
from dlion_operator.pki.run_trust import trusted_bundles
from hostile import bending

OWN, SPEAKER, OTHER = SiteName("plant-a"), SiteName("plant-b"), SiteName("plant-c")
RUN = JobKey("default", "digits", "1")
TEXTS = ("", "x", "a" * 300, "a" * 100_000, "plant-a", "plant-b", "Ready", "\x00", "\u202e", "../x",
         "default/digits#1", "default/digits#2", "a/b", "#")  # fmt: skip
BUNDLE = CertificateAuthority(SPEAKER).bundle_pem
NUMBERS = (*bending.LARGE, -1, -1.0, 0.5, math.nan, math.inf, 1e300)
BYTES = (b"", b"x", bytes(8), bytes(32), b"\xff" * 9000)


def _report(site: SiteName) -> RunReported:
    """A report with every field, of a run with two workers."""
    workers = tuple(WorkerIdentity(Rank(n), site, "small", n) for n in range(2))
    members = tuple(Member(w, 1, MemberState.READY, "10.0.0.1:1", "h:2") for w in workers)
    fields = {"trainer.seed": bytes(8), "exchange.policy": b"\x01" * 8}
    return RunReported(
        RUN,
        SpecFingerprint("ab" * 32, fields, frozenset({"trainer.seed"})),
        ReportedWorkers(workers, members, True, {Rank(0): 0.5}, frozenset({Rank(7)})),
        TrainingFigures(True, 3, 100.0, (LinksTo(OTHER, 1, 2, 1e6),)),
        BUNDLE,
    )


def _valid(rng: random.Random) -> wire.Statement:
    statements: tuple[Statement, ...] = (_report(SPEAKER), RunRemoved(RUN), Heartbeat())
    messages = (site_hello(SPEAKER, OWN), *map(to_wire, statements))
    return rng.choices(messages, (2, 6, 1, 1))[0]


def _altered(rng: random.Random, valid: wire.Statement) -> bytes:
    if rng.random() < 0.4:
        return bending.bytes_of(rng, valid.SerializeToString())
    altered = wire.Statement()
    altered.CopyFrom(valid)
    for _ in range(rng.choice((1, 1, 3))):
        _alter(rng, altered)
    return altered.SerializeToString()


def _alter(rng: random.Random, message: Any) -> None:
    """Change, repeat or remove one field anywhere in the message."""
    fields = message.DESCRIPTOR.fields
    if not fields:  # a heartbeat has no field
        return
    field = rng.choice(fields)
    value = getattr(message, field.name)
    if isinstance(value, Message) and rng.random() < 0.9:
        _alter(rng, value)
        return
    with contextlib.suppress(
        TypeError, ValueError, AttributeError, KeyError, OverflowError
    ):  # of another type
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.name == "fields":
            value[rng.choice(TEXTS)] = rng.choice(BYTES)
        elif not field.is_repeated:
            setattr(message, field.name, rng.choice((*TEXTS, *NUMBERS, *BYTES, True)))
        elif value and isinstance(value[0], Message):
            if rng.random() < 0.3:
                value.extend(list(value) * rng.choice((1, 1, 5000)))
            else:
                _alter(rng, rng.choice(value))
        else:
            value.append(rng.choice((*TEXTS, *NUMBERS)))


def attack_federation(rng: random.Random, folder: Path) -> str | None:
    """Receive one hostile statement on an open stream, or as the beginning of a new one."""
    valid = _valid(rng)
    content = bending.until_different(valid.SerializeToString(), lambda: _altered(rng, valid))
    state = FederationState(OWN, (SPEAKER, OTHER))
    state.open_stream(1, SPEAKER, OWN, 0.0)
    state.receive(1, _report(SPEAKER), 0.0)
    try:
        _receive(state, readable(parser(wire.Statement)(content)))
        word = "taken"
    except (ContractError, StreamRefusedError):
        word = "refused"
    for reports in map(state.reports, (RUN, JobKey("default", "digits", "2"))):
        assert all(
            member.identity.site == site
            for site, report in reports.items()
            for member in report.workers.members
        )
        bundles = {site: report.bundle_pem for site, report in reports.items()}
        for bundle in trusted_bundles((SPEAKER, OTHER), bundles, {}, datetime.now(UTC)).values():
            assert parse_authorities(bundle)
    state.open_stream(3, OTHER, OWN, 2.0)
    assert state.receive(3, _report(OTHER), 2.0) == (RUN,)
    assert state.reachability(OTHER, 2.0).reachable
    return word


def _receive(state: FederationState, message: wire.Statement) -> None:
    """Receive it like `service`. A greeting of another site has another certificate."""
    if message.HasField("hello"):
        site, to_site = sites_of(message.hello)
        if site != SPEAKER:
            raise ContractError(FederationRefusalReason.BAD_CERTIFICATE)
        state.open_stream(2, site, to_site, 1.0)
        return
    statement = statement_of(message, SPEAKER)
    assert statement_of(to_wire(statement), SPEAKER) == statement
    state.receive(1, statement, 1.0)

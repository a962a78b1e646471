"""Hostile and mistaken connections to every port of a run, and to what it dials: the matrix.

Proves: each is refused; what got past TLS is told by metric, reason and event, each once; what did
not is told by whoever dialled (trainers, sidecars, an operator, each as the product has it); the
rightful are let in before and after. Operator, trainer, sidecar and keeper are processes beside a
real API server, tokens are its own (`hostile_scene`). `pytest -s` prints the matrix.
Left out: hostile content of good connections (tests/fuzz, tests/local).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from dlion_api.protocol.refusals import PeerRefusal
from hostile_calls import acknowledged, share, sign
from hostile_cases import CASES, DIALLED, IN_TLS, SERVED, Case, table
from hostile_diallers import mistaken_operator, mistaken_workers
from hostile_scene import NAME, Scene, scene, until

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
ORDERLY = ("Replaced", "Silent")
"""Refusals of plant-b's operator itself, which is greeted in place of whoever has its name."""


@pytest.fixture
def at(kubectl: Kubectl, tmp_path: Path) -> Iterator[Scene]:
    with scene(kubectl, tmp_path) as made:
        yield made


def refused(at: Scene, server: str, reason: str = "") -> float:
    """How often that server has refused somebody for that reason, or for any."""
    if server in ("exchange", "measuring"):
        reasons = [reason] if reason else [str(each) for each in PeerRefusal]
        return sum(at.peer_refusals(server, "served", each) for each in reasons)
    if server == "keeper":
        labels = f'job="{NAME}",namespace="{at.kubectl.namespace}"'
        one = f'{labels},reason="{reason}"' if reason else labels
        return at.operator.metric(f"dlion_keeper_refusals_total{{{one}")
    family = f"dlion_{server}_refusals_total"
    if reason:
        return at.operator.metric(f'{family}{{reason="{reason}"}}')
    orderly = sum(at.operator.metric(f'{family}{{reason="{each}"}}') for each in ORDERLY)
    return at.operator.metric(family) - orderly


def check_served(at: Scene, case: Case) -> None:
    """It is refused, and told as the matrix says."""
    reason = "" if case.reason == IN_TLS else case.reason
    before, records = refused(at, case.at, reason), len(at.records())
    handshakes = at.operator.metric("dlion_federation_handshakes_total")
    ended = case.act(at)
    assert ended.reason == reason, ended
    if case.reason == IN_TLS:
        assert ended.code is grpc.StatusCode.UNAVAILABLE, ended
        assert refused(at, case.at) == before
        if case.at == "federation":
            assert at.operator.metric("dlion_federation_handshakes_total") > handshakes
        return
    until(lambda: refused(at, case.at, reason) > before, f"counted: {case}")
    if case.at in ("exchange", "measuring"):
        until(lambda: len(at.records()) > records, f"an event: {case}")
    elif not case.reported:
        begins = f"{case.at}: {reason}: "
        until(lambda: any(m.startswith(begins) for m in at.events("CallerRefused")), begins)


def lets_in_the_rightful(at: Scene) -> bool:
    """Whether whoever should be let in is."""
    good = grpc.StatusCode.OK
    try:
        return sign()(at).code is share()(at).code is good and bool(acknowledged(at))
    except grpc.RpcError:
        return False


def check_dialled(at: Scene, case: Case) -> None:
    """What answers is not believed, and whoever dialled says so."""
    ended = case.act(at)
    assert ended.code is grpc.StatusCode.UNAVAILABLE, ended
    assert ended.reason == ("" if case.reason == IN_TLS else case.reason), ended


def test_what_is_hostile_or_mistaken_is_refused_and_told(at: Scene) -> None:
    assert lets_in_the_rightful(at)
    wrong = []
    *cases, last = SERVED
    with mistaken_workers(at) as diallers:
        for case in (*cases, *DIALLED, last):
            began_s = time.monotonic()
            try:
                (check_dialled if case in DIALLED else check_served)(at, case)
            except AssertionError as error:
                wrong.append(f"{case.at}, {case.who}: {error}")
            print(f"{time.monotonic() - began_s:5.1f} s  {case.at}: {case.who}")
        for who, tells in diallers.items():
            until(tells, f"the {who}, tells that it is not believed")
    with mistaken_operator(at) as tells:  # not before: others' handshakes are counted above
        until(tells, "an operator tells that it is not believed")
    assert not wrong, "\n".join(wrong)
    until(lambda: lets_in_the_rightful(at), "the rightful are let in again")
    until(lambda: at.events("MessageRefused"), "what workers tell is told in the cluster")
    print("\n".join(["", *table(CASES)]))

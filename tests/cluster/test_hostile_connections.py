"""Test a matrix of hostile and mistaken connections to every port of a run, and from it.

Each is refused. A refusal after TLS is reported once by metric, reason and event. A refusal by TLS
is reported by the dialling process: trainer, sidecar or operator. Valid callers are accepted before
and after. Operator, trainer, sidecar and keeper are processes beside a real API server with its own
tokens (`hostile_scene`). `pytest -s` prints the matrix. Left out: hostile content of valid
connections (tests/fuzz, tests/local).
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
"""Reasons for which plant-b's own operator is refused; these do not count as hostile calls."""


@pytest.fixture
def at(kubectl: Kubectl, tmp_path: Path) -> Iterator[Scene]:
    with scene(kubectl, tmp_path) as made:
        yield made


def refused(at: Scene, server: str, reason: str = "") -> float:
    """Return how often that server refused a caller for that reason, or for any."""
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
    """Check that it is refused, and reported as in the matrix."""
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


def accepts_valid_callers(at: Scene) -> bool:
    """Report whether valid callers are accepted."""
    good = grpc.StatusCode.OK
    try:
        return sign()(at).code is share()(at).code is good and bool(acknowledged(at))
    except grpc.RpcError:
        return False


def check_dialled(at: Scene, case: Case) -> None:
    """Check that the answer is rejected, and that the dialling process reports it."""
    ended = case.act(at)
    assert ended.code is grpc.StatusCode.UNAVAILABLE, ended
    assert ended.reason == ("" if case.reason == IN_TLS else case.reason), ended


def test_hostile_and_mistaken_connections_are_refused_and_reported(at: Scene) -> None:
    assert accepts_valid_callers(at)
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
        for who, reports in diallers.items():
            until(reports, f"the {who}, reports the rejection")
    with mistaken_operator(at) as reports:  # not earlier: handshakes are counted above
        until(reports, "an operator reports the rejection")
    assert not wrong, "\n".join(wrong)
    until(lambda: accepts_valid_callers(at), "valid callers are accepted again")
    until(lambda: at.events("MessageRefused"), "reports of workers are events in the cluster")
    print("\n".join(["", *table(CASES)]))

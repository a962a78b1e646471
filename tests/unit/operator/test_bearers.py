"""Facts: a pod's token brings certificates to its first bearer alone, in each role and at each
renewal; no request is taken twice; a newer token starts anew; tokens of no pod are not counted;
what is remembered is bounded."""

from __future__ import annotations

import pytest

from dlion_api.names import KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_operator.bearers import MAX_PODS, Bearer, Holders, Proof

SITE = SiteName("plant-a")
WORKER = WorkerIdentity(Rank(0), SITE, "small", 0)
TOKEN = Bearer("uid-1", 1000)
NEWER = Bearer("uid-1", 1001)


FIRST = Proof(b"key", 5)


def held(proof: Proof = FIRST) -> Holders:
    """One bearer has had a trainer's certificate."""
    holders = Holders()
    assert holders.admit(WORKER, "trainer", TOKEN, proof)
    return holders


def test_who_had_the_first_certificate_gets_the_others() -> None:
    holders = held()
    for count in (6, 7, 2**63):
        assert holders.admit(WORKER, "trainer", TOKEN, Proof(b"key", count))


@pytest.mark.parametrize(
    "proof",
    [Proof(b"another", 6), Proof(b"another", 5), Proof(), Proof(b"key", 5), Proof(b"key", 4)],
    ids=["another key", "another key, same count", "none", "the same again", "an earlier one"],
)
def test_nobody_else_does_and_it_is_none_the_worse(proof: Proof) -> None:
    holders = held()
    assert not holders.admit(WORKER, "trainer", TOKEN, proof)
    assert not holders.admit(WORKER, "trainer", Bearer("uid-1", 999), proof), "nor with an old one"
    assert holders.admit(WORKER, "trainer", TOKEN, Proof(b"key", 6))


def test_whoever_has_lost_the_key_comes_with_the_next_token() -> None:
    holders = held()
    assert holders.admit(WORKER, "trainer", NEWER, Proof(b"new", 1))
    assert not holders.admit(WORKER, "trainer", NEWER, Proof(b"key", 6))
    assert not holders.admit(WORKER, "trainer", TOKEN, Proof(b"key", 7)), "the old token is over"
    assert holders.admit(WORKER, "trainer", NEWER, Proof(b"new", 2))


def test_a_worker_of_an_earlier_release_proves_nothing_and_goes_on() -> None:
    holders = held(Proof())
    assert holders.admit(WORKER, "trainer", TOKEN, Proof())
    assert not holders.admit(WORKER, "trainer", TOKEN, Proof(b"key", 1))


def test_roles_workers_and_pods_are_told_apart() -> None:
    holders = held()
    other = WorkerIdentity(Rank(1), SITE, "small", 1)
    assert holders.admit(WORKER, "sidecar", TOKEN, Proof(b"sidecar's", 1))
    assert holders.admit(other, "trainer", Bearer("uid-2", 1), Proof(b"other's", 1))
    assert holders.admit(KeeperIdentity(SITE), "keeper", Bearer("uid-3", 1), Proof(b"keeper's", 1))
    assert holders.admit(WORKER, "trainer", Bearer("uid-4", 1), Proof(b"next pod's", 1))
    assert not holders.admit(WORKER, "trainer", TOKEN, Proof(b"next pod's", 2))


def test_tokens_of_no_pod_are_taken_as_often_as_they_come() -> None:
    holders = Holders()
    for key in (b"one", b"two", b""):
        assert holders.admit(WORKER, "trainer", Bearer(), Proof(key, 1))


def test_pods_that_have_ended_are_forgotten() -> None:
    holders = held()
    for number in range(MAX_PODS):
        assert holders.admit(WORKER, "trainer", Bearer(f"pod-{number}", 1), Proof(b"key", 1))
    assert holders.admit(WORKER, "trainer", TOKEN, Proof(b"another", 1)), "as on the first day"

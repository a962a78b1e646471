"""Test the binding of a pod's token to its first bearer.

Each use of the token is bound separately. No request is accepted twice. Tokens without a pod have
no binding. Memory is bounded.
"""

from __future__ import annotations

import pytest

from dlion_api.names import KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_operator.pki.token_bindings import MAX_PODS, Bearer, Proof, TokenBindings

SITE = SiteName("plant-a")
WORKER = WorkerIdentity(Rank(0), SITE, "small", 0)
POD = Bearer("uid-1")
FIRST = Proof(b"key", 5)


def held(proof: Proof = FIRST) -> TokenBindings:
    """Return bindings with one bearer that has a trainer's certificate."""
    holders = TokenBindings()
    assert holders.admit(WORKER, "trainer", POD, proof)
    return holders


def test_the_first_bearer_gets_all_later_certificates() -> None:
    holders = held()
    for count in (6, 7, 2**63):
        assert holders.admit(WORKER, "trainer", POD, Proof(b"key", count))


@pytest.mark.parametrize(
    "proof",
    [Proof(b"another", 6), Proof(b"another", 5), Proof(), Proof(b"key", 5), Proof(b"key", 4)],
    ids=["another key", "another key, same count", "none", "the same again", "an earlier one"],
)
def test_another_bearer_is_refused_without_effect_on_the_first(proof: Proof) -> None:
    holders = held()
    assert not holders.admit(WORKER, "trainer", POD, proof)
    assert holders.admit(WORKER, "trainer", POD, Proof(b"key", 6))


@pytest.mark.parametrize("use", ["sidecar", "join"])
def test_another_bearer_is_refused_for_another_use(use: str) -> None:
    holders = held()
    assert not holders.admit(WORKER, use, POD, Proof(b"another", 9))
    assert not holders.admit(WORKER, use, POD, Proof())
    assert holders.admit(WORKER, use, POD, Proof(b"key", 1)), "each use is counted separately"
    assert not holders.admit(WORKER, use, POD, Proof(b"key", 1))


def test_a_pod_of_an_earlier_release_continues_without_a_proof() -> None:
    holders = held(Proof())
    assert holders.admit(WORKER, "trainer", POD, Proof())
    assert holders.admit(WORKER, "join", POD, Proof())
    assert not holders.admit(WORKER, "trainer", POD, Proof(b"key", 1))


def test_workers_and_pods_are_distinguished() -> None:
    holders = held()
    other = WorkerIdentity(Rank(1), SITE, "small", 1)
    assert holders.admit(other, "trainer", Bearer("uid-2"), Proof(b"other's", 1))
    assert holders.admit(KeeperIdentity(SITE), "keeper", Bearer("uid-3"), Proof(b"keeper's", 1))
    assert holders.admit(WORKER, "trainer", Bearer("uid-4"), Proof(b"next pod's", 1))
    assert not holders.admit(WORKER, "trainer", POD, Proof(b"next pod's", 2))


def test_tokens_without_a_pod_are_always_accepted() -> None:
    holders = TokenBindings()
    for key in (b"one", b"two", b""):
        assert holders.admit(WORKER, "trainer", Bearer(), Proof(key, 1))


def test_ended_pods_are_forgotten_and_a_calling_pod_is_not() -> None:
    holders = held()
    for number in range(MAX_PODS - 1):
        assert holders.admit(WORKER, "trainer", Bearer(f"pod-{number}"), Proof(b"key", 1))
    assert not holders.admit(WORKER, "trainer", POD, Proof(b"another", 1)), "it called again"
    assert holders.admit(WORKER, "trainer", Bearer("pod-9"), Proof(b"key", 1))
    assert not holders.admit(WORKER, "trainer", POD, Proof(b"another", 1))
    assert holders.admit(WORKER, "trainer", Bearer("pod-0"), Proof(b"another", 1)), "the oldest"

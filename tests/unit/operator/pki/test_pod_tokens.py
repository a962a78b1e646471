"""Test the verification of pod tokens.

- The token of a running pod with a worker's labels, of the Job that the operator created for it, is
  valid for that worker only. Each hostile token is refused.
- The keys are read again for an unknown key, at a limited rate, and when they are old, so that a
  withdrawn key ends.
- A cluster whose keys cannot be read refuses calls for now, and is read again soon.

Left out: tokens of a real API server (tests/cluster/test_pod_tokens.py).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from dlion_api.cluster_names import TOKEN_AUDIENCE
from dlion_api.errors import UnavailableError
from dlion_api.names import JobKey, KeeperIdentity, Rank, SiteName, WorkerIdentity
from dlion_operator.kubernetes.client import Kind, SigningKeys
from dlion_operator.kubernetes.store import ClusterStore, ObjectName
from dlion_operator.pki.pod_tokens import (
    KEYS_MAX_AGE_S,
    KEYS_MIN_INTERVAL_S,
    RETRY_S,
    TEMPLATE_LABEL,
    PodOwner,
    PodTokens,
    expected_labels,
    expected_owner,
)
from dlion_operator.pki.token_bindings import Bearer

JOB = JobKey("default", "digits", "1")
SITE = SiteName("plant-a")
WORKER = WorkerIdentity(Rank(1), SITE, "small", 1)
KEEPER = KeeperIdentity(SITE)
ISSUER = "https://kubernetes.default.svc"
RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def jwk(key: rsa.RSAPrivateKey, key_id: str) -> dict[str, Any]:
    document = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
    return {**document, "kid": key_id, "alg": "RS256", "use": "sig"}


def claims(**changes: Any) -> dict[str, Any]:
    """Return the claims of the worker's pod; a change to None removes a claim."""
    now = int(time.time())
    payload: dict[str, Any] = {
        "aud": [TOKEN_AUDIENCE],
        "iss": ISSUER,
        "iat": now - 10,
        "nbf": now - 10,
        "exp": now + 86_400,  # hostile tokens are created long before their use
        "sub": "system:serviceaccount:default:default",
        "kubernetes.io": {
            "namespace": "default",
            "pod": {"name": "digits-small-1-x", "uid": "uid-1"},
            "serviceaccount": {"name": "default", "uid": "s"},
        },
    }
    payload.update(changes)
    return {name: value for name, value in payload.items() if value is not None}


def signed(
    payload: Mapping[str, Any], key: Any = RSA_KEY, kid: str = "k1", alg: str = "RS256"
) -> str:
    return jwt.encode(dict(payload), key, algorithm=alg, headers={"kid": kid})


def by_hand(
    header: Mapping[str, Any], payload: Mapping[str, Any], sign: Callable[[bytes], bytes]
) -> str:
    parts = [encoded(json.dumps(part).encode()) for part in (header, payload)]
    return ".".join([*parts, encoded(sign(".".join(parts).encode()))])


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def of_pod(**changes: str) -> dict[str, Any]:
    pod = {"name": "digits-small-1-x", "uid": "uid-1"} | changes
    return claims(**{"kubernetes.io": {"namespace": "default", "pod": pod}})


def controlled(
    name: str,
    owner: PodOwner | None = None,
    *,
    who: WorkerIdentity | KeeperIdentity = WORKER,
    job: JobKey = JOB,
    **changes: Any,
) -> dict[str, Any]:
    """Return a pod as its Job or its Deployment creates it, or another owner."""
    labels = expected_labels(who, job) | {TEMPLATE_LABEL: "6d5f8"}
    owner = owner or expected_owner(who, job, labels)
    reference = {"kind": owner.kind, "name": owner.name, "uid": f"of {owner.name}"}
    metadata = {
        "namespace": "default",
        "name": name,
        "uid": "uid-1",
        "labels": labels,
        "ownerReferences": [reference | {"controller": True}],
    }
    return {"kind": "Pod", "metadata": metadata | changes}


OTHER_OWNERS = (
    PodOwner("Job", "digits-1-large"),
    PodOwner("ReplicaSet", expected_owner(WORKER, JOB, {}).name),
    PodOwner("Job", ""),
)


@dataclass
class Site:
    """A cluster as the verifier reads it: pods, keys, and the number of reads."""

    store: ClusterStore = field(default_factory=ClusterStore)
    keys: list[dict[str, Any]] = field(default_factory=lambda: [jwk(RSA_KEY, "k1")])
    reads: int = 0
    is_away: bool = False
    hangs: bool = False
    now_s: float = 1000.0
    cluster_ahead: timedelta = timedelta()
    """The time of the operator's clock."""

    def __post_init__(self) -> None:
        other = JobKey("default", "other", "1")
        for job in (JOB, other):
            self.put_job(expected_owner(WORKER, job, {}).name)
        self.put_job("digits-1-large")
        pods = [
            controlled("digits-small-1-x"),
            controlled("keeper-x", who=KEEPER, uid="uid-2"),
            controlled("digits-small-1-x", namespace="other"),
            controlled("other-job", job=other, uid="uid-3"),
            controlled("no-labels", labels={}, uid="uid-4"),
            controlled("no-owner", ownerReferences=[], uid="uid-5"),
        ]
        pods += [
            controlled(f"other-owner-{number}", owner, uid=f"uid-{number}")
            for number, owner in enumerate(OTHER_OWNERS, 6)
        ]
        for pod in pods:
            self.store.put(Kind.POD, pod)
        self.tokens = PodTokens(
            self.store,
            self.read_keys,
            monotonic_s=lambda: self.now_s,
            now=lambda: datetime.now(UTC) + self.cluster_ahead,
        )

    def put_job(self, name: str, uid: str = "") -> None:
        metadata = {"namespace": "default", "name": name, "uid": uid or f"of {name}"}
        self.store.put(Kind.JOB, {"kind": "Job", "metadata": metadata})

    async def read_keys(self) -> SigningKeys:
        self.reads += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.is_away:
            raise UnavailableError("no API server")
        return SigningKeys(json.dumps({"keys": self.keys}).encode(), ISSUER)

    def bearer(
        self, token: str, who: WorkerIdentity | KeeperIdentity = WORKER, job: JobKey = JOB
    ) -> Bearer | None:
        return asyncio.run(self.tokens.verify(token, who, job))

    def holds(
        self, token: str, who: WorkerIdentity | KeeperIdentity = WORKER, job: JobKey = JOB
    ) -> bool:
        return self.bearer(token, who, job) is not None


def test_a_workers_token_is_valid_for_that_worker_only() -> None:
    site, token = Site(), signed(claims())
    assert site.holds(token)
    others: list[tuple[WorkerIdentity | KeeperIdentity, JobKey]] = [
        (WorkerIdentity(Rank(0), SITE, "small", 0), JOB),
        (WorkerIdentity(Rank(1), SITE, "gpu", 1), JOB),
        (WorkerIdentity(Rank(1), SiteName("plant-b"), "small", 1), JOB),
        (KEEPER, JOB),
        (WORKER, JobKey("default", "digits", "2")),
        (WORKER, JobKey("default", "other", "1")),
        (WORKER, JobKey("other", "digits", "1")),
    ]
    for who, job in others:
        assert not site.holds(token, who, job), (who, job)


def test_the_owner_of_a_token_is_known() -> None:
    assert Site().bearer(signed(claims())) == Bearer("uid-1")


def test_a_keepers_token_is_valid_for_the_keeper() -> None:
    site, token = Site(), signed(of_pod(name="keeper-x", uid="uid-2"))
    assert site.holds(token, KEEPER)
    assert not site.holds(token, WORKER)


def test_the_token_of_a_deleted_pod_is_invalid() -> None:
    site, token = Site(), signed(claims())
    assert site.holds(token)
    site.store.replace_all({})
    assert not site.holds(token)


PUBLIC_PEM = RSA_KEY.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)
HOSTILE: dict[str, str] = {
    "empty": "",
    "garbage": "garbage",
    "three parts of garbage": "a.b.c",
    "not ASCII": "ß.ß.ß",
    "huge": "x" * 9000,
    "deep": encoded(b"[" * 3000) + ".e30.e30",
    "algorithm none": by_hand({"alg": "none", "kid": "k1"}, claims(), lambda _: b""),
    "none, spelt otherwise": by_hand({"alg": "NonE", "kid": "k1"}, claims(), lambda _: b""),
    "no algorithm": by_hand({"kid": "k1"}, claims(), lambda _: b""),
    "HS256 with the public key": by_hand(
        {"alg": "HS256", "kid": "k1"},
        claims(),
        lambda text: hmac.new(PUBLIC_PEM, text, hashlib.sha256).digest(),
    ),
    "HS256 with nothing": by_hand(
        {"alg": "HS256", "kid": "k1"},
        claims(),
        lambda text: hmac.new(b"", text, hashlib.sha256).digest(),
    ),
    "another key under this name": signed(claims(), OTHER_KEY),
    "another kind of key under this name": signed(claims(), EC_KEY, alg="ES256"),
    "an unknown key": signed(claims(), OTHER_KEY, "k9"),
    "no key named": jwt.encode(claims(), OTHER_KEY, algorithm="RS256"),
    "a key in the token": jwt.encode(
        claims(), OTHER_KEY, algorithm="RS256", headers={"jwk": jwk(OTHER_KEY, "k1")}
    ),
    "key's name is not text": by_hand({"alg": "RS256", "kid": {}}, claims(), lambda _: b"x"),
    "signature cut off": signed(claims()).rpartition(".")[0] + ".",
    "claims changed": ".".join(
        [
            signed(claims()).split(".")[0],
            encoded(json.dumps(of_pod(name="keeper-x", uid="uid-2")).encode()),
            signed(claims()).split(".")[2],
        ]
    ),
    "another audience": signed(claims(aud=["https://kubernetes.default.svc"])),
    "no audience": signed(claims(aud=None)),
    "another issuer": signed(claims(iss="https://elsewhere")),
    "no issuer": signed(claims(iss=None)),
    "expired": signed(claims(exp=int(time.time()) - 60)),
    "for ever": signed(claims(exp=None)),
    "not valid yet": signed(claims(nbf=int(time.time()) + 86_400, exp=int(time.time()) + 172_800)),
    "of no pod": signed(claims(**{"kubernetes.io": {"namespace": "default"}})),
    "of nothing": signed(claims(**{"kubernetes.io": None})),
    "of a list": signed(claims(**{"kubernetes.io": ["default"]})),
    "pod is a text": signed(
        claims(**{"kubernetes.io": {"namespace": "default", "pod": "digits-small-1-x"}})
    ),
    "another pod's UID": signed(of_pod(uid="uid-2")),
    "pod of another job": signed(of_pod(name="other-job", uid="uid-3")),
    "pod without labels": signed(of_pod(name="no-labels", uid="uid-4")),
    "pod with the labels that nothing controls": signed(of_pod(name="no-owner", uid="uid-5")),
    "pod with the labels of another Job": signed(of_pod(name="other-owner-6", uid="uid-6")),
    "pod with the labels of a ReplicaSet": signed(of_pod(name="other-owner-7", uid="uid-7")),
    "pod with the labels of a nameless Job": signed(of_pod(name="other-owner-8", uid="uid-8")),
    "pod of another namespace": signed(
        claims(
            **{
                "kubernetes.io": {
                    "namespace": "other",
                    "pod": {"name": "digits-small-1-x", "uid": "uid-1"},
                }
            }
        )
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_token_is_refused(name: str) -> None:
    site = Site()
    assert not site.holds(HOSTILE[name])
    assert site.holds(signed(claims())), "an honest token is still accepted"


def test_times_are_those_of_the_cluster_whatever_the_local_clock_shows() -> None:
    now = int(time.time())
    for ahead in (timedelta(hours=2), timedelta(hours=-2)):
        made_s = now + int(ahead.total_seconds())
        fresh = claims(iat=made_s - 10, nbf=made_s - 10, exp=made_s + 3600)
        for site in (Site(cluster_ahead=ahead), Site()):
            is_theirs = site.cluster_ahead == ahead
            assert site.holds(signed(fresh)) == is_theirs


def test_a_new_key_is_found_and_strangers_cannot_cause_more_reads() -> None:
    site = Site()
    assert site.holds(signed(claims()))
    assert site.reads == 1
    for number in range(20):
        assert not site.holds(signed(claims(), OTHER_KEY, f"unknown-{number}"))
    assert site.reads == 1
    site.keys.append(jwk(OTHER_KEY, "k2"))
    assert not site.holds(signed(claims(), OTHER_KEY, "k2")), "not yet: the keys were just read"
    site.now_s += KEYS_MIN_INTERVAL_S
    assert site.holds(signed(claims(), OTHER_KEY, "k2"))
    assert site.reads == 2


def test_a_failed_read_of_keys_is_retried_soon_but_not_at_every_call() -> None:
    site = Site(is_away=True)
    for _ in range(20):
        assert not site.holds(signed(claims()))
    assert site.reads == 1
    site.is_away = False
    site.now_s += RETRY_S
    assert site.holds(signed(claims()))


def test_known_keys_stay_valid_while_the_api_server_is_unreachable() -> None:
    site = Site()
    assert site.holds(signed(claims()))
    site.is_away = True
    site.now_s += 1000
    assert site.holds(signed(claims()))
    assert not site.holds(signed(claims(), OTHER_KEY, "k2"))
    assert site.holds(signed(claims()))


def test_a_withdrawn_key_becomes_invalid() -> None:
    site = Site()
    token = signed(claims())
    assert site.holds(token)
    site.keys = [jwk(OTHER_KEY, "k2")]
    site.now_s += KEYS_MAX_AGE_S - 1
    assert site.holds(token)
    site.now_s += 1
    assert not site.holds(token)
    assert site.holds(signed(claims(), OTHER_KEY, "k2"))
    assert site.reads == 2


def test_reads_of_old_keys_are_rare_while_the_api_server_does_not_answer() -> None:
    site = Site()
    assert site.holds(signed(claims()))
    site.is_away = True
    site.now_s += KEYS_MAX_AGE_S
    for _ in range(20):
        assert site.holds(signed(claims()))
    assert site.reads == 2
    site.now_s += KEYS_MIN_INTERVAL_S
    assert site.holds(signed(claims()))
    assert site.reads == 3


def test_strangers_do_not_delay_the_read_of_old_keys() -> None:
    site = Site()
    token, stranger = signed(claims()), signed(claims(), OTHER_KEY, "k2")
    assert site.holds(token)
    site.is_away = True
    site.now_s += KEYS_MAX_AGE_S
    assert not site.holds(stranger)
    site.is_away, site.keys = False, [jwk(OTHER_KEY, "k2")]
    site.now_s += RETRY_S
    assert not site.holds(token), "the key is withdrawn"


def test_a_malformed_key_set_does_not_invalidate_known_keys() -> None:
    site = Site()
    token = signed(claims())
    assert site.holds(token)
    site.keys = [{"kty": "none"}]
    site.now_s += KEYS_MAX_AGE_S
    assert site.holds(token)
    site.keys = [jwk(RSA_KEY, "k1")]
    site.now_s += KEYS_MIN_INTERVAL_S
    assert site.holds(token)
    assert site.reads == 3


def test_an_endless_read_delays_known_callers_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlion_operator.pki.pod_tokens.REFRESH_TIMEOUT_S", 0.01)
    site = Site()
    assert site.holds(signed(claims()))
    site.hangs = True
    site.now_s += KEYS_MAX_AGE_S
    assert site.holds(signed(claims()))


@pytest.mark.parametrize("age_s", [KEYS_MIN_INTERVAL_S, KEYS_MAX_AGE_S])
def test_an_endless_read_for_a_stranger_does_not_hold_known_callers_up(
    monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    monkeypatch.setattr("dlion_operator.pki.pod_tokens.REFRESH_TIMEOUT_S", 0.01)

    async def known_while_a_stranger_waits(site: Site) -> Bearer | None:
        stranger = asyncio.create_task(site.tokens.verify(signed(claims(), OTHER_KEY, "k2"),
                                                          WORKER, JOB))  # fmt: skip
        await asyncio.sleep(0)  # it reads
        try:
            async with asyncio.timeout(10):
                return await site.tokens.verify(signed(claims()), WORKER, JOB)
        finally:
            stranger.cancel()

    site = Site()
    assert site.holds(signed(claims()))
    site.hangs = True
    site.now_s += age_s
    assert asyncio.run(known_while_a_stranger_waits(site)) is not None
    assert site.reads == 2


# ---- pods as the watches report them ------------------------------------------------------------


def test_a_pod_counts_only_for_the_existing_job() -> None:
    """Not for an invented or deleted job of that name. A pod that has ended does not count."""
    name = expected_owner(WORKER, JOB, {}).name
    owner = {"kind": "Job", "name": name, "uid": f"of {name}", "controller": True}
    token = signed(claims())
    for changes in ({"uid": "of an earlier one"}, {"name": "someone"}, {"controller": False}):
        site, stored = Site(), controlled("digits-small-1-x")
        stored["metadata"] |= {"ownerReferences": [owner | changes], "resourceVersion": "2"}
        assert site.holds(token)
        site.store.put(Kind.POD, stored)
        assert not site.holds(token), changes
    site = Site()
    ended = controlled("digits-small-1-x", resourceVersion="2") | {"status": {"phase": "Failed"}}
    site.store.put(Kind.POD, ended)
    assert not site.holds(token)
    site = Site()
    job = site.store.get(Kind.JOB, ObjectName("default", name))
    assert job is not None
    site.store.remove(Kind.JOB, job)
    assert not site.holds(token)

"""Hostile tokens of pods, for the verifier of a site's coordinator.

The result must be whether the token belongs to that worker, never an error. It is true only if the
cluster's key has signed the token's claims.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import json
import random
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from dlion_api.cluster_names import TOKEN_AUDIENCE
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_operator.kubernetes.client import Kind, SigningKeys
from dlion_operator.kubernetes.store import ClusterStore
from dlion_operator.pki.pod_tokens import (
    PodTokens,
    expected_labels,
    expected_owner,
)
from hostile import bending

JOB = JobKey("default", "digits", "1")
WORKER = WorkerIdentity(Rank(1), SiteName("plant-a"), "small", 1)
ISSUER = "https://kubernetes.default.svc"
POD = {"name": "digits-small-1-x", "uid": "uid-1"}
HEADERS = ("none", "None", "HS256", "ES256", "ES512", "RS256", "", None, 0, [], {}, "x" * 5000)


@functools.cache
def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


class _Site:
    """A cluster with one pod and one key."""

    def __init__(self) -> None:
        labels = expected_labels(WORKER, JOB)
        owner = expected_owner(WORKER, JOB, labels)
        job = {"namespace": JOB.namespace, "name": owner.name, "uid": "job-1"}
        reference = {"kind": owner.kind, "name": owner.name, "uid": "job-1", "controller": True}
        pod = POD | {"namespace": JOB.namespace, "labels": labels, "ownerReferences": [reference]}
        self.store = ClusterStore()
        self.store.put(Kind.JOB, {"metadata": job})
        self.store.put(Kind.POD, {"metadata": pod})

    async def read_keys(self) -> SigningKeys:
        key = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(_key().public_key()))
        keys = [{**key, "kid": "k1", "alg": "ES256"}]
        return SigningKeys(json.dumps({"keys": keys}).encode(), ISSUER)


def _claims() -> dict[str, Any]:
    now = int(time.time())
    claims = {"namespace": JOB.namespace, "pod": POD}
    times = {"iat": now - 10, "nbf": now - 10, "exp": now + 600}
    return {"aud": [TOKEN_AUDIENCE], "iss": ISSUER, "kubernetes.io": claims, **times}


def _part(value: object) -> str:
    text = json.dumps(value).encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def _altered(rng: random.Random, valid: str, claims: dict[str, Any]) -> str:
    header, payload, signature = valid.split(".")
    match rng.randrange(5):
        case 0:
            header = _part({"alg": rng.choice(HEADERS), "typ": "JWT", "kid": "k1"})
        case 1:
            header = _part(bending.value_of(rng, {"alg": "ES256", "kid": "k1", "crit": ["x"]}))
        case 2:
            payload = _part(bending.value_of(rng, claims))
        case 3:
            signature = rng.choice(("", "AA", signature[:-4], payload, "é"))
        case _:
            return bending.bytes_of(rng, valid.encode()).decode("utf-8", "replace")
    return f"{header}.{payload}.{signature}"


def attack_token(rng: random.Random, folder: Path) -> str | None:
    """Verify one hostile token, and then the valid one, which must still be accepted."""
    claims = _claims()
    valid = jwt.encode(claims, _key(), algorithm="ES256", headers={"kid": "k1"})
    wrong = bending.until_different(valid, lambda: _altered(rng, valid, claims))
    tokens = PodTokens(_Site().store, _Site().read_keys)

    async def verified() -> tuple[bool, bool]:
        return (
            await tokens.verify(wrong, WORKER, JOB) is not None,
            await tokens.verify(valid, WORKER, JOB) is not None,
        )

    taken, honest = asyncio.run(verified())
    assert honest
    if taken:  # the same claims, encoded in another way
        assert _decoded(wrong) == _decoded(valid)
    return "taken" if taken else "refused"


def _decoded(token: str) -> list[bytes]:
    """Decode the parts' bytes; like the verifier, skip characters outside base64."""
    return [
        binascii.a2b_base64(part.translate({45: 43, 95: 47}) + "==") for part in token.split(".")
    ]

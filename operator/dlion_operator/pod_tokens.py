"""Whose a pod's token is: projected service account tokens, held against the cluster and its pods.

A token is a signed statement of the API server: this pod, of this UID, in this namespace. It is
checked with the cluster's public keys, which every service account may read, so no further right is
needed; and then against the pod itself, which must be there, bear the labels of that worker, and be
of the Job or Deployment that the operator has made for it: labels are whoever's may make a pod.
Source: RFC 7519; projected tokens of Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import jwt

from dlion_api import cluster_names as names
from dlion_api.errors import DLionError
from dlion_api.names import JobKey, KeeperIdentity, WorkerIdentity
from dlion_api.refusals import MAX_TOKEN_BYTES
from dlion_operator.bearers import Bearer

_LOG = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512")
"""What API servers sign with. Never `none`, never a shared secret."""

KEYS_EVERY_S = 10.0
"""So often the keys are read again, where a token names one that is not known."""
RETRY_S = 1.0
"""The same where they could not be read: strangers' tokens must not turn into as many requests."""
KEYS_LAST_S = 600.0
"""After so long they are read again, so that one that the cluster has withdrawn ends."""
REFRESH_WITHIN_S = 2.0
"""So long whoever comes with a known key waits for that at most; then its old keys hold, and are
read again after KEYS_EVERY_S."""
LEEWAY_S = 30.0
TEMPLATE_LABEL = "pod-template-hash"


@dataclass(frozen=True)
class Owner:
    """The controller that a pod is of."""

    kind: str
    name: str


@dataclass(frozen=True)
class FoundPod:
    """What a pod is known by."""

    labels: Mapping[str, str]
    owner: Owner | None
    """None: it has none, or names one that is not there."""


class Pods(Protocol):
    """The pods that there are."""

    def find(self, namespace: str, name: str, uid: str) -> FoundPod | None:
        """That very pod; None: there is none, or it has ended."""
        ...


@dataclass(frozen=True)
class Keys:
    """What the cluster's tokens are checked with."""

    jwks: bytes
    issuer: str


class PodTokens:
    """A `dlion_operator.coordinator.served_run.TokenVerifier` for a cluster."""

    def __init__(
        self,
        pods: Pods,
        read_keys: Callable[[], Awaitable[Keys]],
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`read_keys` may raise UnavailableError: then no new key is known for now. `now` is the
        time of the cluster that makes the tokens."""
        self._pods = pods
        self._read_keys = read_keys
        self._monotonic_s = monotonic_s
        self._now = now
        self._keys: dict[str, jwt.PyJWK] = {}
        self._issuer = ""
        self._reading = asyncio.Lock()
        self._read_s = self._not_before_s = float("-inf")
        """When keys were read, and before when they are not asked for again."""

    async def verify(
        self, token: str, worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> Bearer | None:
        """Whose that token is, where it is that worker's, or that keeper's, of that run."""
        if len(token) > MAX_TOKEN_BYTES:
            return None
        try:
            claims = await self._claims(token)
        except (jwt.PyJWTError, ArithmeticError, ValueError, TypeError, RecursionError) as error:
            _LOG.info("%s: token refused: %s", worker.name, error)
            return None
        if not self._is_theirs(claims, worker, job):
            return None
        return Bearer(str(claims["kubernetes.io"]["pod"]["uid"]))

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """What the token says, once its signature, audience, issuer and time hold."""
        key = await self._key(str(jwt.get_unverified_header(token).get("kid", "")))
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key.key,
            algorithms=[key.algorithm_name] if key.algorithm_name in ALGORITHMS else [],
            audience=names.TOKEN_AUDIENCE,
            issuer=self._issuer,
            options={
                "require": ["exp", "iss", "aud"],
                # By this machine's clock; `_check_time` holds them against the cluster's.
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
        self._check_time(claims)
        return claims

    def _check_time(self, claims: Mapping[str, Any]) -> None:
        """Raises: jwt.PyJWTError, ArithmeticError, ValueError, TypeError: it does not hold now."""
        now_s = self._now().timestamp()
        if not float(claims["exp"]) > now_s - LEEWAY_S:
            raise jwt.ExpiredSignatureError("Signature has expired")
        for name in ("nbf", "iat"):
            if not float(claims.get(name, now_s)) <= now_s + LEEWAY_S:
                raise jwt.ImmatureSignatureError(f"The token is not yet valid ({name})")

    async def _key(self, key_id: str) -> jwt.PyJWK:
        async with self._reading:
            await self._read_for(key_id)
        if key_id not in self._keys:
            raise jwt.InvalidKeyError(f"no key {key_id[:80]!r} in this cluster")
        return self._keys[key_id]

    async def _read_for(self, key_id: str) -> None:
        """Reads the keys anew where that one is not known, or they are old; who comes meanwhile
        waits for it. While they cannot be read those that are known go on."""
        now_s, is_known = self._monotonic_s(), key_id in self._keys
        is_wanted = not is_known or now_s - self._read_s >= KEYS_LAST_S
        if not is_wanted or now_s < self._not_before_s:
            return
        self._not_before_s = now_s + KEYS_EVERY_S
        try:
            async with asyncio.timeout(REFRESH_WITHIN_S if is_known else None):
                keys = await self._read_keys()
            known = jwt.PyJWKSet.from_json(keys.jwks.decode()).keys
        except (DLionError, TimeoutError, jwt.PyJWTError, ValueError) as error:
            _LOG.warning("workers cannot be told apart: %s", error)
            if is_known:
                return
            self._not_before_s = now_s + RETRY_S
            raise jwt.InvalidKeyError(f"the cluster's keys cannot be read: {error}") from error
        self._keys = {str(key.key_id): key for key in known}
        self._issuer, self._read_s = keys.issuer, now_s

    def _is_theirs(
        self, claims: Mapping[str, Any], worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> bool:
        try:
            said = claims["kubernetes.io"]
            namespace, pod = str(said["namespace"]), said["pod"]
            found = self._pods.find(namespace, str(pod["name"]), str(pod["uid"]))
        except (KeyError, TypeError):
            return False
        if namespace != job.namespace or found is None:
            return False
        labels = found.labels
        if any(labels.get(name) != value for name, value in wanted_labels(worker, job).items()):
            return False
        if found.owner == wanted_owner(worker, job, labels):
            return True
        _LOG.warning("%s: token refused: its pod %s is not of its Job", worker.name, pod["name"])
        return False


def wanted_owner(
    worker: WorkerIdentity | KeeperIdentity, job: JobKey, labels: Mapping[str, str]
) -> Owner:
    """The controller of that worker's pod, or that keeper's. `labels` are the pod's: a Deployment's
    pods are of a ReplicaSet that is called by a hash of theirs."""
    if isinstance(worker, KeeperIdentity):
        template = labels.get(TEMPLATE_LABEL, "")
        return Owner("ReplicaSet", f"{names.keeper_name(job)}-{template}")
    return Owner("Job", names.group_job_name(job, worker.group))


def wanted_labels(worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> dict[str, str]:
    """The labels by which a pod is that worker's, or that keeper's."""
    wanted = names.run_labels(job, worker.site)
    if isinstance(worker, KeeperIdentity):
        return wanted | {names.COMPONENT_LABEL: names.KEEPER}
    return wanted | {
        names.COMPONENT_LABEL: names.WORKER,
        names.GROUP_LABEL: worker.group,
        names.INDEX_LABEL: str(worker.index),
    }

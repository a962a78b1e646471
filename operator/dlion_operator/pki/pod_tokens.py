"""Verify pods' projected service account tokens against the cluster's keys and pods.

A token is the API server's signed statement of a pod's name, UID and namespace. It is verified with
the cluster's public keys, which every service account may read. The pod must then exist, have the
worker's labels, and be owned by the operator's Job or Deployment: anyone who may create pods can
set labels. Source: RFC 7519; projected tokens of Kubernetes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jwt

from dlion_api import cluster_names as names
from dlion_api.errors import DLionError
from dlion_api.names import JobKey, KeeperIdentity, WorkerIdentity
from dlion_api.protocol.refusals import MAX_TOKEN_BYTES
from dlion_operator.kubernetes.client import Document, Kind, SigningKeys
from dlion_operator.kubernetes.store import ClusterStore, ObjectName
from dlion_operator.pki.token_bindings import Bearer

_LOG = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512")
"""Algorithms that API servers sign with; not `none`, no shared secrets."""

KEYS_MIN_INTERVAL_S = 10.0
"""Shortest interval between reads of the keys, for tokens with an unknown key."""
RETRY_S = 1.0
"""The same after a failed read: unknown tokens must not cause a request each."""
KEYS_MAX_AGE_S = 600.0
"""Keys are read again after this time, so that a revoked key expires."""
REFRESH_TIMEOUT_S = 2.0
"""Longest wait for a key refresh before cached keys are used. The next refresh is due after
KEYS_MIN_INTERVAL_S."""
LEEWAY_S = 30.0
TEMPLATE_LABEL = "pod-template-hash"


@dataclass(frozen=True)
class PodOwner:
    """The controller that owns a pod."""

    kind: str
    name: str


class PodTokens:
    """Implements `dlion_operator.coordinator.served_run.TokenVerifier` for a cluster."""

    def __init__(
        self,
        store: ClusterStore,
        read_keys: Callable[[], Awaitable[SigningKeys]],
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`read_keys` may raise UnavailableError; cached keys stay in use. `now`: cluster time."""
        self._store = store
        self._read_keys = read_keys
        self._monotonic_s = monotonic_s
        self._now = now
        self._keys: dict[str, jwt.PyJWK] = {}
        self._issuer = ""
        self._reading = asyncio.Lock()
        self._read_s = self._not_before_s = float("-inf")
        """When keys were last read, and the earliest time of the next read."""

    async def verify(
        self, token: str, worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> Bearer | None:
        """Return the token's bearer if it belongs to that worker or keeper of that run."""
        if len(token) > MAX_TOKEN_BYTES:
            return None
        try:
            claims = await self._claims(token)
        except (jwt.PyJWTError, ArithmeticError, ValueError, TypeError, RecursionError) as error:
            _LOG.info("%s: token refused: %s", worker.name, error)
            return None
        if not self._belongs_to(claims, worker, job):
            return None
        return Bearer(str(claims["kubernetes.io"]["pod"]["uid"]))

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """Return the token's claims after verifying signature, audience, issuer and time."""
        key = await self._key(str(jwt.get_unverified_header(token).get("kid", "")))
        claims: Mapping[str, Any] = jwt.decode(
            token,
            key.key,
            algorithms=[key.algorithm_name] if key.algorithm_name in ALGORITHMS else [],
            audience=names.TOKEN_AUDIENCE,
            issuer=self._issuer,
            options={
                "require": ["exp", "iss", "aud"],
                # PyJWT would use the local clock; `_check_time` uses the cluster's.
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
        self._check_time(claims)
        return claims

    def _check_time(self, claims: Mapping[str, Any]) -> None:
        """Raise jwt.PyJWTError, ArithmeticError, ValueError or TypeError if not valid now."""
        now_s = self._now().timestamp()
        if not float(claims["exp"]) > now_s - LEEWAY_S:
            raise jwt.ExpiredSignatureError("Signature has expired")
        for name in ("nbf", "iat"):
            if not float(claims.get(name, now_s)) <= now_s + LEEWAY_S:
                raise jwt.ImmatureSignatureError(f"The token is not yet valid ({name})")

    async def _key(self, key_id: str) -> jwt.PyJWK:
        is_known = key_id in self._keys
        if not is_known or self._are_old():
            try:
                async with asyncio.timeout(REFRESH_TIMEOUT_S if is_known else None), self._reading:
                    await self._read_for(key_id)
            except TimeoutError:
                _LOG.warning("workers' tokens are verified with old keys: no answer with new ones")
        if key_id not in self._keys:
            raise jwt.InvalidKeyError(f"no key {key_id[:80]!r} in this cluster")
        return self._keys[key_id]

    def _are_old(self) -> bool:
        return self._monotonic_s() - self._read_s >= KEYS_MAX_AGE_S

    async def _read_for(self, key_id: str) -> None:
        """Refresh the keys if this one is unknown or they are old; on failure keep the known ones.

        Concurrent callers with an unknown key wait for the refresh.
        """
        now_s, is_known = self._monotonic_s(), key_id in self._keys
        if (is_known and not self._are_old()) or now_s < self._not_before_s:
            return
        self._not_before_s = now_s + KEYS_MIN_INTERVAL_S
        try:
            keys = await self._read_keys()
            known = jwt.PyJWKSet.from_json(keys.jwks.decode()).keys
        except (DLionError, TimeoutError, jwt.PyJWTError, ValueError) as error:
            _LOG.warning("workers' tokens cannot be verified with current keys: %s", error)
            if is_known:
                return
            self._not_before_s = now_s + RETRY_S
            raise jwt.InvalidKeyError(f"the cluster's keys cannot be read: {error}") from error
        self._keys = {str(key.key_id): key for key in known}
        self._issuer, self._read_s = keys.issuer, now_s

    def _belongs_to(
        self, claims: Mapping[str, Any], worker: WorkerIdentity | KeeperIdentity, job: JobKey
    ) -> bool:
        try:
            claim = claims["kubernetes.io"]
            namespace, pod = str(claim["namespace"]), claim["pod"]
            name, uid = str(pod["name"]), str(pod["uid"])
        except (KeyError, TypeError):
            return False
        document = self._store.get(Kind.POD, ObjectName(namespace, name))
        if namespace != job.namespace or document is None or document["metadata"].get("uid") != uid:
            return False
        labels = document["metadata"].get("labels") or {}
        has_ended = (document.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        if has_ended or not expected_labels(worker, job).items() <= labels.items():
            return False
        if self._owner(document) == expected_owner(worker, job, labels):
            return True
        _LOG.warning("%s: token refused: its pod %s is not of its Job", worker.name, name)
        return False

    def _owner(self, pod: Document) -> PodOwner | None:
        """Its controller, or None. A Job must match by UID; ReplicaSets are not watched."""
        references = pod["metadata"].get("ownerReferences") or ()
        controller = next((each for each in references if each.get("controller")), None)
        if controller is None:
            return None
        owner = PodOwner(str(controller.get("kind")), str(controller.get("name")))
        if owner.kind == "Job":
            job = self._store.get(Kind.JOB, ObjectName(pod["metadata"]["namespace"], owner.name))
            if job is None or job["metadata"].get("uid") != controller.get("uid"):
                return None
        return owner


def expected_owner(
    worker: WorkerIdentity | KeeperIdentity, job: JobKey, labels: Mapping[str, str]
) -> PodOwner:
    """Return the expected owner of a worker's or keeper's pod.

    `labels` are the pod's: a Deployment's ReplicaSet is named after a hash in them.
    """
    if isinstance(worker, KeeperIdentity):
        template = labels.get(TEMPLATE_LABEL, "")
        return PodOwner("ReplicaSet", f"{names.keeper_name(job)}-{template}")
    return PodOwner("Job", names.group_job_name(job, worker.group))


def expected_labels(worker: WorkerIdentity | KeeperIdentity, job: JobKey) -> dict[str, str]:
    """Return the labels that identify a worker's or keeper's pod."""
    wanted = names.run_labels(job, worker.site)
    if isinstance(worker, KeeperIdentity):
        return wanted | {names.COMPONENT_LABEL: names.KEEPER}
    return wanted | {
        names.COMPONENT_LABEL: names.WORKER,
        names.GROUP_LABEL: worker.group,
        names.INDEX_LABEL: str(worker.index),
    }

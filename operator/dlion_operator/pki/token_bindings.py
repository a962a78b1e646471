"""Bind each pod's token to the key that the pod first proved. Pure.

A token alone can be replayed by anyone who has read it in a request. So a pod generates a key,
which never leaves it, and signs each certificate, join and follow request with it. The first key
presented with a pod's token is bound to the pod.
"""

from dataclasses import dataclass, field

from dlion_api.names import KeeperIdentity, WorkerIdentity

MAX_PODS = 4
"""Remembered per worker or keeper: one runs, others are terminating."""


@dataclass(frozen=True)
class Bearer:
    """The owner of a valid token."""

    pod_uid: str = ""
    """Empty: the token has no pod, as in a run without a cluster, and is bound to no key."""


@dataclass(frozen=True)
class Proof:
    """A verified proof: its key, and the request's counter."""

    key_der: bytes = b""
    """Empty: no proof, as from workers of an earlier release."""
    count: int = 0


@dataclass
class _Pod:
    """One pod's key, and the highest counter of each use."""

    key_der: bytes
    counts: dict[str, int] = field(default_factory=dict)


class TokenBindings:
    """The keys bound to the pods of each worker and keeper of one run.

    A restarted operator starts without bindings; workers rejoin and keepers follow again at once.
    """

    def __init__(self) -> None:
        self._pods: dict[object, dict[str, _Pod]] = {}

    def admit(
        self, identity: WorkerIdentity | KeeperIdentity, use: str, bearer: Bearer, proof: Proof
    ) -> bool:
        """Whether the proof is by the pod's bound key and not a replay."""
        if not bearer.pod_uid:
            return True
        pods = self._pods.setdefault(identity, {})
        pod = pods.pop(bearer.pod_uid, None) or _Pod(proof.key_der)
        pods[bearer.pod_uid] = pod  # the most recent last
        while len(pods) > MAX_PODS:
            del pods[next(iter(pods))]
        is_its_own = proof.key_der == pod.key_der
        is_new = not proof.key_der or proof.count > pod.counts.get(use, 0)
        if is_its_own and is_new:
            pod.counts[use] = proof.count
        return is_its_own and is_new

"""Who bears a pod's token: what it brings, it brings to one bearer while the pod lives. Pure.

A token is no secret for ever: it stands in requests, and whoever has read one could show it again,
or the next one. So a pod makes a key, which never leaves it, and proves with it each request for a
certificate, each joining and each following. The first that comes is the pod's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlion_api.names import KeeperIdentity, WorkerIdentity

MAX_PODS = 4
"""Of one worker or keeper that are remembered: one lives, others end."""


@dataclass(frozen=True)
class Bearer:
    """Whose a token is that holds."""

    pod_uid: str = ""
    """Empty: of no pod, as in a run without a cluster. Such tokens stand in nobody's way."""


@dataclass(frozen=True)
class Proof:
    """What came with a request, and held: its key, and the request's count."""

    key_der: bytes = b""
    """Empty: nothing came, as from workers of an earlier release."""
    count: int = 0


@dataclass
class _Pod:
    """One pod's key, and the highest count of each use."""

    key_der: bytes
    counts: dict[str, int] = field(default_factory=dict)


class Holders:
    """Of each worker and keeper of one run, the bearers of its pods' tokens since this began.

    An operator that starts anew knows none of them; a pod's worker joins again, and its keeper
    follows again, as soon as it is there.
    """

    def __init__(self) -> None:
        self._pods: dict[object, dict[str, _Pod]] = {}

    def admit(
        self, who: WorkerIdentity | KeeperIdentity, use: str, bearer: Bearer, proof: Proof
    ) -> bool:
        """Whether that token is shown by its pod, for the first time with this proof."""
        if not bearer.pod_uid:
            return True
        pods = self._pods.setdefault(who, {})
        pod = pods.pop(bearer.pod_uid, None) or _Pod(proof.key_der)
        pods[bearer.pod_uid] = pod  # the newest is the last one
        while len(pods) > MAX_PODS:
            del pods[next(iter(pods))]
        is_its_own = proof.key_der == pod.key_der
        is_new = not proof.key_der or proof.count > pod.counts.get(use, 0)
        if is_its_own and is_new:
            pod.counts[use] = proof.count
        return is_its_own and is_new

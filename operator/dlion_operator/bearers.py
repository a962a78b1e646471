"""Who bears a pod's token: a token that has brought a certificate is taken from its first bearer
alone. Pure.

A token is no secret for ever: it stands in requests, and whoever has read one could show it again
while the pod lives. So each request for a certificate is signed by a key that never leaves the pod,
and counted. A pod that has lost its key (its folder is gone or damaged) comes with its next token,
which its cluster gives it, and nobody has shown before.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlion_api.names import KeeperIdentity, WorkerIdentity

MAX_PODS = 4
"""Of one worker or keeper that are remembered: one lives, others end."""


@dataclass(frozen=True)
class Bearer:
    """Whose a token is that holds."""

    pod_uid: str = ""
    """Empty: of no pod, as in a run without a cluster. Such tokens are taken as often as they come:
    nothing brings newer ones."""
    issued_at_s: int = 0
    """By the clock of whoever issued it; only ever compared with others of the same pod."""


@dataclass(frozen=True)
class Proof:
    """What came with a request, and held: its key, and how many it has signed."""

    key_der: bytes = b""
    """Empty: nothing came, as from workers of an earlier release."""
    count: int = 0


class Holders:
    """Of each worker and keeper of one run, the bearers of its pods' tokens since this began.

    An operator that starts anew knows none of them, and takes the first that comes.
    """

    def __init__(self) -> None:
        self._pods: dict[tuple[object, str], dict[str, tuple[Bearer, Proof]]] = {}

    def admit(
        self, who: WorkerIdentity | KeeperIdentity, role: str, bearer: Bearer, proof: Proof
    ) -> bool:
        """Whether that token may bring a certificate in that role; if so it is this bearer's."""
        if not bearer.pod_uid:
            return True
        pods = self._pods.setdefault((who, role), {})
        known = pods.get(bearer.pod_uid)
        if known is not None and not _goes_on(*known, bearer, proof):
            return False
        pods[bearer.pod_uid] = (bearer, proof)
        while len(pods) > MAX_PODS:
            del pods[next(iter(pods))]
        return True


def _goes_on(before: Bearer, shown: Proof, bearer: Bearer, proof: Proof) -> bool:
    """Whether whoever bears it now is who had a certificate before, or shows a newer token."""
    if bearer.issued_at_s > before.issued_at_s:
        return True
    return proof.key_der == shown.key_der and (proof.count > shown.count or not proof.key_der)

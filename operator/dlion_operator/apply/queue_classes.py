"""Read the classes that give a queued run its priority.

These kinds have no namespace, and a few classes serve all jobs of a cluster. They are read by name
and kept for a while, for all jobs together. A watch would need the right to list all classes.
"""

from collections.abc import Callable
from typing import Final

from dlion_operator.kubernetes.client import Document, Kind, KubernetesClient

KEPT_S: Final = 60.0
"""Seconds for which a class that was read is used."""
MISSING_S: Final = 5.0
"""The same for a missing class; shorter than the time between two passes over a job that waits."""


class QueueClasses:
    """The classes of one cluster."""

    def __init__(self, cluster: KubernetesClient, monotonic_s: Callable[[], float]) -> None:
        self._cluster = cluster
        self._monotonic_s = monotonic_s
        self._read: dict[tuple[Kind, str], tuple[Document | None, float]] = {}
        """Each class, with the time until which it is not read again."""

    async def get(self, kind: Kind, name: str) -> Document | None:
        """Return the class; None: it does not exist. Raises: as KubernetesClient.get."""
        now_s = self._monotonic_s()
        self._read = {key: each for key, each in self._read.items() if now_s < each[1]}
        if (kind, name) not in self._read:
            found = await self._cluster.get(kind, "", name)
            self._read[kind, name] = (found, now_s + (KEPT_S if found else MISSING_S))
        return self._read[kind, name][0]

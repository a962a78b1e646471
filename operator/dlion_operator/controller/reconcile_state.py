"""What the operator remembers of one job between two passes. `reconcile` owns it.

Nothing depends on it after a restart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from dlion_operator.apply.object_applier import ObjectApplier
from dlion_operator.apply.runtime_reader import RuntimeReader
from dlion_operator.apply.workload_reader import WorkloadReader
from dlion_operator.kubernetes.client import Document, RequestRefusedError
from dlion_operator.model.durations import DurationTracker
from dlion_operator.model.site_runtime import RuntimeState
from dlion_operator.model.workload_view import QueueState
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.pki.named_secret import NamedSecret
from dlion_operator.plan.decisions import JobEvent
from dlion_operator.plan.node_states import NodeState
from dlion_operator.plan.observed import MissingPod, RejectedObject, UnreadyPod

FIRST_RETRY_S: Final = 10.0
MAX_RETRY_S: Final = 600.0
"""Longest wait before a rejected object is tried again, doubling from the first. A policy, quota or
right may change without a notification."""

ManifestVersion = tuple[object, tuple[tuple[str, str], ...]]
"""Generation of a manifest, and its labels, which do not change the generation."""


@dataclass
class RejectionBackoff:
    """The object that the API server rejected last, and when to retry."""

    rejected: RejectedObject | None = None
    """None: nothing is rejected."""
    retry_at_s: float = 0.0
    _manifest_version: ManifestVersion | None = None
    _count: int = 0
    """Consecutive rejections."""

    def is_due(self, now_s: float) -> bool:
        return self.rejected is None or now_s >= self.retry_at_s

    def record(self, document: Document, error: RequestRefusedError, now_s: float) -> None:
        self.rejected = RejectedObject(str(error), error.code)
        self._manifest_version = _manifest_version(document)
        self.retry_at_s = now_s + min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._count, 16))
        self._count += 1

    def reset(self) -> bool:
        """Forget the rejection. Return whether there was one."""
        was_refused, self.rejected, self._count = self.rejected is not None, None, 0
        return was_refused

    def reset_if_changed(self, document: Document) -> None:
        """Forget the rejection of an earlier manifest: a new one is tried at once."""
        if self._manifest_version != _manifest_version(document):
            self.reset()


@dataclass
class ReconcileState:
    document: Document
    """The DLionJob, as the latest pass found it."""
    applier: ObjectApplier
    secret: NamedSecret
    workload: WorkloadReader
    runtimes: RuntimeReader
    runtime: RuntimeState | None = None
    queue: QueueState | None = None
    policy_since: datetime | None = None
    authority: NamedAuthority | None = None
    rejection: RejectionBackoff = field(default_factory=RejectionBackoff)
    failing_since_s: float | None = None
    last_error: str = ""
    status_written_s: float = float("-inf")
    telemetry_at_s: float = float("-inf")
    """Progress alone is not written before."""
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    disrupted_pods: frozenset[str] = frozenset()
    """UIDs of pods whose disruption has its event."""
    blocked_pods: frozenset[str] = frozenset()
    """Terminating pods on working nodes for which an event was posted."""
    missing: DurationTracker[MissingPod] = field(default_factory=DurationTracker)
    unready: DurationTracker[UnreadyPod] = field(default_factory=DurationTracker)
    unposted_events: list[JobEvent] = field(default_factory=list)

    @property
    def uid(self) -> str:
        return str(self.document["metadata"]["uid"])


def _manifest_version(document: Document) -> ManifestVersion:
    metadata = document["metadata"]
    return metadata.get("generation"), tuple(sorted((metadata.get("labels") or {}).items()))

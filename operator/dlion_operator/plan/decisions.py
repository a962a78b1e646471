"""The actions that `decide` may choose: plain data, which `reconcile` carries out in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.revocation import Revocation, RevocationInEffect
from dlion_api.spec import Job
from dlion_operator.kubernetes.client import Document, Kind
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.plan.objects.exposure import Addresses


@dataclass(frozen=True)
class Apply:
    """Create or update this object by server-side apply."""

    document: Document
    exposes: str = ""
    """Name of the worker Service that the object is or belongs to. Such objects come last, and the
    run continues without them (`Observed.failed_objects`)."""


@dataclass(frozen=True)
class Create:
    """Create this object unless it exists. It is never updated as a whole.

    Of an existing ConfigMap `object_applier` updates what new pods need.
    """

    document: Document


@dataclass(frozen=True)
class Patch:
    kind: Kind
    name: str
    patch: Document
    subresource: str = ""


@dataclass(frozen=True)
class Delete:
    """Delete an object. `grace_s` 0: without waiting for its node."""

    kind: Kind
    name: str
    uid: str = ""
    """Empty: any object of that name that this DLionJob owns; not for Jobs and pods."""
    grace_s: int | None = None


@dataclass(frozen=True)
class OpenRun:
    """Let these workers of this run join, and no others. Earlier runs are closed."""

    job: Job
    workers: tuple[WorkerIdentity, ...]
    spec_hash: str
    """The hash of the manifest that its workers report."""
    age_s: float
    """Time since the run began. Times in its records count from there, also after a restart of the
    operator."""
    failed: frozenset[Rank] = frozenset()
    """Workers of this site that failed permanently."""
    addresses: Addresses | None = None
    """Addresses of this site's workers for other sites. None: workers report them."""
    authority: NamedAuthority | None = None
    """State of the authority that the job names. None: the site's own signs."""
    kept_bundles: Mapping[SiteName, bytes] = field(default_factory=dict)
    """Bundles by which the run's workers were trusted before this operator started."""
    revocations: tuple[Revocation, ...] = ()
    """What is revoked at this site, and which quarantines are lifted."""
    kept_revocations: tuple[RevocationInEffect, ...] = ()
    """All that were known before this operator started."""
    job_uid: str = ""
    """UID of the DLionJob at this site, which workers' checkpoints are bound to."""


@dataclass(frozen=True)
class StopRun:
    reason: str


@dataclass(frozen=True)
class FinishRun:
    reason: str
    succeeded: bool


@dataclass(frozen=True)
class CloseRun:
    """Stop serving any run of this job."""


Action = Apply | Create | Patch | Delete | OpenRun | StopRun | FinishRun | CloseRun


@dataclass(frozen=True)
class JobEvent:
    reason: str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"
    count: int = 1
    """Occurrences since the event was posted last."""


@dataclass(frozen=True)
class Decision:
    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    """The complete desired status. None: leave it unchanged."""
    events: tuple[JobEvent, ...] = ()
    """Posted after the status is written, and only if that changed something."""
    requeue_after_s: float | None = None
    """When to reconcile again if nothing happens."""

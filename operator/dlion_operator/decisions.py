"""What `decide` says is to be done: plain data, carried out by `reconcile` in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.spec import Job
from dlion_operator.cluster import Document, Kind
from dlion_operator.exposure import Addresses
from dlion_operator.job_authority import NamedAuthority


@dataclass(frozen=True)
class Apply:
    """Have this object as it stands here (server-side apply)."""

    document: Document
    exposes: str = ""
    """Name of the worker's Service that it is or belongs to: it comes after everything else, which
    goes on without it (`Observed.unmade`)."""


@dataclass(frozen=True)
class Create:
    """Have this object; it is never changed afterwards as a whole. Of a ConfigMap that is there,
    what `children.to_follow` names becomes as it is here."""

    document: Document


@dataclass(frozen=True)
class Patch:
    """Change these fields of an object."""

    kind: Kind
    name: str
    patch: Document
    subresource: str = ""


@dataclass(frozen=True)
class Delete:
    """Have no such object. `grace_s` 0: without waiting for its node."""

    kind: Kind
    name: str
    uid: str = ""
    """Empty: whichever has that name and is owned by this DLionJob; no Job, and no pod."""
    grace_s: int | None = None


@dataclass(frozen=True)
class OpenRun:
    """Let these workers of this run join, and no others; earlier runs are closed."""

    job: Job
    workers: tuple[WorkerIdentity, ...]
    spec_hash: str
    """What they say that their manifest's is."""
    age_s: float
    """How long ago the run began: its records' times count from there, whoever serves it."""
    failed: frozenset[Rank] = frozenset()
    """Of these workers, those of this site that have failed for good."""
    addresses: Addresses | None = None
    """Where other sites reach this one's workers; None: where these say."""
    authority: NamedAuthority | None = None
    """What there is of the authority that the job names; None: the site's own signs."""
    kept_bundles: Mapping[SiteName, bytes] = field(default_factory=dict)
    """By which the run's workers were known before this operator started, in that case."""


@dataclass(frozen=True)
class StopRun:
    """Ask the workers to end the run and save what they have."""

    reason: str


@dataclass(frozen=True)
class FinishRun:
    """Tell the keeper that the run is over."""

    reason: str
    succeeded: bool


@dataclass(frozen=True)
class CloseRun:
    """Serve no run of this job any more."""


Action = Apply | Create | Patch | Delete | OpenRun | StopRun | FinishRun | CloseRun


@dataclass(frozen=True)
class Notice:
    """A Kubernetes event on the DLionJob."""

    reason: str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"
    count: int = 1
    """How often it has happened since it was told last."""


@dataclass(frozen=True)
class Decision:
    """Everything that one look at a job leads to."""

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    """The whole status as it should be; None: leave it alone."""
    notices: tuple[Notice, ...] = ()
    """Told once the status has been written, and only if that changed something."""
    look_again_s: float | None = None
    """When to look again though nothing happened."""

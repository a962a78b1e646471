"""What the operator observes of one job before it decides: pure views of Kubernetes objects."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.endings import EndReport, describe_exit
from dlion_api.names import SiteName
from dlion_api.protocol.revocation import Revocation, RevocationInEffect, parse_revocations
from dlion_api.spec.failures import WorkerEnd, end_of_exit
from dlion_api.status import LinkStatus, Reason, TrainerStatus
from dlion_operator.kubernetes.failure_backoff import FailedObject
from dlion_operator.model.download_progress import DownloadProgress
from dlion_operator.model.job_view import (
    Document,
    ObjectView,
    condition,
    condition_text,
    parse_time,
)
from dlion_operator.model.site_runtime import RuntimeState
from dlion_operator.model.workload_view import QueueState
from dlion_operator.pki.named_authority import NamedAuthority
from dlion_operator.plan.initializer_state import end_of_initializer, failed_initializer
from dlion_operator.plan.node_states import NodeState


def first_of(names: Sequence[str], most: int) -> str:
    """The first of these names, and the number of the rest.

    >>> first_of(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


NODE_LOST = "NodeLost"
"""Reason of the condition DisruptionTarget that an operator writes to a pod on a lost node."""
MissingPod = tuple[str, int]
"""A pod that does not exist: name of its Job or Deployment, and its index."""
UnreadyPod = tuple[str, str]
"""A pod that runs and does not serve: its UID, and the time since then by its node."""

ALL_HEARD_AFTER_S = 45.0
"""A restarted operator has heard from every existing worker after this time."""

_FAILED_WAITING_REASONS = names.IMAGE_REASONS | names.CONTAINER_REASONS | {"CrashLoopBackOff"}
_FAILURE_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)

_POLICY_MESSAGE = re.compile(r"ValidatingAdmissionPolicy|admission webhook .+ denied the request")
"""The API server's messages for rejections by admission plugins, whatever their code."""


@dataclass(frozen=True)
class RemoteView:
    is_reachable: bool = False
    """Whether its operator is connected."""
    heartbeat_age_s: float | None = None
    """Time since its last message. None: there was none."""
    problem: str = ""
    """What prevents cooperation, for users. Empty: nothing."""
    has_run: bool = False
    """Whether it reports that it serves this run."""
    knows_all: bool = False
    """Whether it has heard from every existing worker."""
    agrees: bool = True
    """Whether its manifest equals the one here."""
    spec_hash: str = ""
    workers: int | None = None
    """Number of workers that it wants now. None: as in the manifest here."""
    iteration: int = 0
    samples_per_s: float = 0.0


@dataclass(frozen=True)
class RunView:
    """What the coordinator knows of a run that it serves."""

    open_s: float
    ready: Mapping[SiteName, int] = field(default_factory=dict)
    """Present workers, by site."""
    report_age_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since each worker was last present, by name. Missing if it never joined."""
    training: bool = False
    all_joined_s: float = 0.0
    """How long all workers have been present without any training. 0: that is not the case."""
    stop_reason: str = ""
    """Why the run is ending or has ended. Empty: it is in progress."""
    trainer_status: TrainerStatus | None = None
    steps_per_second: str = ""
    links: LinkStatus | None = None
    iteration: int = 0
    """Iteration of this site's most advanced worker."""
    samples_per_s: float = 0.0
    """Total speed of this site's workers."""
    linked: Mapping[SiteName, int] = field(default_factory=dict)
    """Workers that are linked with a worker here, by site."""
    remote: Mapping[SiteName, RemoteView] = field(default_factory=dict)
    """The other sites of the manifest. Empty where no others are configured."""
    drift: str = ""
    """Where the sites' manifests differ. Empty: no known difference."""
    bundles: Mapping[SiteName, bytes] = field(default_factory=dict)
    """Trust bundles of each site's workers, where the job names an authority."""
    revocations: tuple[RevocationInEffect, ...] = ()
    """Revocations in effect at all sites, by name."""
    downloads: Mapping[str, DownloadProgress] = field(default_factory=dict)
    """The last report of each worker's init container, by the worker's name."""


EMPTY_RUN_VIEW = RunView(open_s=0.0)


@dataclass(frozen=True)
class RejectedObject:
    """A child that the API server rejects. The operator retries with back-off."""

    message: str
    code: int
    """HTTP status: 400, 403, 404, 422 or similar."""

    @property
    def reason(self) -> Reason:
        """The cause: an admission policy, a missing right or quota, or the manifest."""
        if _POLICY_MESSAGE.search(self.message):
            return Reason.POLICY_DENIED
        return Reason.FORBIDDEN if self.code in (403, 404) else Reason.INVALID_SPEC


@dataclass(frozen=True)
class TerminatingPods:
    """Terminating pods of one job, of any run, with or without their Jobs."""

    documents: Sequence[Document] = ()
    durations_s: Mapping[str, float] = field(default_factory=dict)
    """How long each of them has been terminating, by UID."""
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    """States of the nodes of overdue ones, by name (`garbage_collection.overdue_pods`)."""


@dataclass(frozen=True)
class Observed:
    """One job and all its objects, at one moment."""

    document: Document
    jobs: Sequence[Document]
    """Jobs of any run; pods and services likewise."""
    pods: Sequence[Document]
    services: Sequence[Document]
    now: datetime
    authority_pem: str
    run: RunView | None = None
    remote_view: RunView = EMPTY_RUN_VIEW
    """What other sites report of the run, where it is not served here."""
    rejected: RejectedObject | None = None
    """A child of this run that the API server rejects."""
    failed_objects: Mapping[str, FailedObject] = field(default_factory=dict)
    """Failed objects for exposing workers, by the name of the worker's Service."""
    authority: NamedAuthority | None = None
    """State of the authority that the job names. None: it names none."""
    queue: QueueState | None = None
    """What Kueue reports of the job. None: it has no queue."""
    runtime: RuntimeState | None = None
    """The DLionRuntime that the job uses. None: not read yet."""
    policy_since: datetime | None = None
    """Time since which the site's admission policy checks the rights of users who write jobs. None:
    it does not."""
    last_error: str = ""
    """A lasting error that keeps the operator from acting on this job. Empty: none."""
    missing_s: Mapping[MissingPod, float] = field(default_factory=dict)
    """How long each missing pod has been missing (`missing_pods`)."""
    terminating: TerminatingPods = TerminatingPods()
    unready_s: Mapping[UnreadyPod, float] = field(default_factory=dict)
    """How long each keeper's pod has run without serving (`startup_delays`)."""
    keeper: Document | None = None
    """The keeper's Deployment."""


@dataclass(frozen=True)
class PodProblem:
    reason: Reason
    message: str


class PodView(ObjectView):
    def __init__(self, document: Document) -> None:
        super().__init__(document)
        self.deleted_at = parse_time(document["metadata"].get("deletionTimestamp"))
        """End of its grace period by the API server's clock. None: it is not being deleted."""

    @property
    def worker(self) -> str:
        """Short name for users: group and index."""
        group, index = self.labels.get(names.GROUP_LABEL), self.labels.get(names.INDEX_LABEL)
        return self.name if group is None or index is None else f"{group}-{index}"

    @property
    def index(self) -> int | None:
        """Its worker's index within the group, or None."""
        text = str(self.labels.get(names.INDEX_LABEL, ""))
        return int(text) if text.isdecimal() else None

    @property
    def failures(self) -> int:
        """Failed pods of its index before it."""
        counts = (str(self.annotations.get(name, "")) for name in _FAILURE_COUNTS)
        return sum(int(count) for count in counts if count.isdecimal())

    @property
    def grace_s(self) -> float:
        """Seconds that it has to terminate once it is deleted."""
        return float(self.document["metadata"].get("deletionGracePeriodSeconds") or 0)

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def containers_ended(self) -> bool:
        """Whether its node has reported that all its containers have ended."""
        states = [status.get("state") or {} for status in self._container_statuses()]
        return bool(states) and all("terminated" in state for state in states)

    @property
    def node_address(self) -> str:
        """Address of its node. Empty: it has none yet."""
        return str(self._status.get("hostIP") or "")

    @property
    def node(self) -> str:
        """Name of its node. Empty: it has none yet."""
        return str(self._spec.get("nodeName") or "")

    @property
    def phase(self) -> str:
        return str(self._status.get("phase", "Pending"))

    @property
    def trainer_exit(self) -> int | None:
        """Exit code of its trainer, if that has ended."""
        return self._trainer("terminated").get("exitCode")

    @property
    def end(self) -> WorkerEnd | None:
        """How it failed. None: it did not, or ended on request, or before any container began."""
        if self.phase != "Failed":
            return None
        if self.disruption:
            return "Disrupted"
        code = self.trainer_exit
        return end_of_initializer(self.document) if code is None else end_of_exit(code)

    @property
    def disruption(self) -> str:
        """Why it was evicted. Empty: it was not."""
        return condition_text(self.document, "DisruptionTarget")

    def node_lost_status(self, now: datetime) -> Document:
        """Its status, written in place of a node that does not answer."""
        others = [
            c for c in self._status.get("conditions") or () if c["type"] != "DisruptionTarget"
        ]
        lost = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": NODE_LOST,
            "message": "DLion: its node does not answer",
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return {"phase": "Failed", "conditions": [*others, lost]}

    def condition(self, type_: str) -> Document:
        return condition(self.document, type_)

    @property
    def trainer_started_at(self) -> datetime | None:
        """When its trainer's container started. None: it does not run."""
        return parse_time(self._trainer("running").get("startedAt"))

    @property
    def unready(self) -> UnreadyPod | None:
        """Identifies the time in which it runs without serving. None: it serves, or does not run
        yet.

        A pod that has served in between gets a new identity, even if this operator missed that.
        """
        ready = self.condition("Ready")
        if self.phase != "Running" or ready.get("status") != "False":
            return None
        return self.uid, str(ready.get("lastTransitionTime", ""))

    def problem(self) -> PodProblem | None:
        """Why it does not run, if waiting alone may not help."""
        if self.deleted_at is not None or self.is_finished:
            return None
        scheduled = self.condition("PodScheduled")
        if scheduled.get("reason") == "Unschedulable":
            message = f"{self.worker}: {scheduled.get('message', '')}"
            return PodProblem(Reason.UNSCHEDULABLE, message)
        for status in self._container_statuses():
            waiting = (status.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _FAILED_WAITING_REASONS:
                reason = waiting["reason"]
                message = f"{self.worker}, container {status.get('name')}: {reason}"
                message += f": {waiting['message']}" if waiting.get("message") else ""
                is_image = reason in names.IMAGE_REASONS
                return PodProblem(
                    Reason.IMAGE_UNAVAILABLE if is_image else Reason.CONTAINER_BROKEN, message
                )
        return None

    def _container_statuses(self) -> Iterator[Document]:
        yield from self._status.get("initContainerStatuses") or ()
        yield from self._status.get("containerStatuses") or ()

    def _trainer(self, state: str) -> Document:
        """What its trainer's container reports of that state. Empty: it is in another."""
        for status in self._status.get("containerStatuses") or ():
            if status.get("name") == names.TRAINER_CONTAINER:
                return (status.get("state") or {}).get(state) or {}
        return {}

    @property
    def failure(self) -> str:
        """How it failed, in one line. Empty: it did not."""
        if self.phase != "Failed":
            return ""
        if self.disruption:
            return f"{self.worker}: {self.disruption}"
        code = self.trainer_exit
        if code is None:
            if (ended := failed_initializer(self.document)) is not None:
                return f"{self.worker}: {ended}"
            reason, message = self._status.get("reason", ""), self._status.get("message", "")
            return f"{self.worker}: {reason} {message}"
        # Output of its trainer and of the supervisor, which writes JSON.
        lines = [line for line in self._termination_message().splitlines() if line.strip()]
        return f"{self.worker}: trainer ended with {describe_exit(code, lines)}"

    @property
    def end_report(self) -> EndReport | None:
        """The report of its trainer, if that ended successfully and left one."""
        if self.phase != "Succeeded":
            return None
        return EndReport.from_json(self._termination_message())

    def _termination_message(self) -> str:
        return str(self._trainer("terminated").get("message") or "")


def revocations_in(status: Mapping[str, Any]) -> tuple[RevocationInEffect, ...]:
    """What that status of a job lists as revoked."""
    return tuple(
        RevocationInEffect(
            str(each.get("name")),
            str(each.get("reason") or ""),
            by=SiteName(str(each.get("by"))),
            is_effective=bool(each.get("effective")),
            is_automatic=bool(each.get("automatic")),
        )
        for each in status.get("revoked") or ()
    )


def given_revocations(
    annotations: Mapping[str, Any], kept: Sequence[RevocationInEffect], site: SiteName
) -> tuple[tuple[Revocation, ...], str]:
    """Return what the job's annotation has, and what is wrong with it (empty: nothing). If nothing
    in it can be read, the last ones of people stay: a slip of the pen must not lift them."""
    found, problem = parse_revocations(str(annotations.get(names.REVOKED_ANNOTATION) or ""))
    if problem and not found:
        by_people = (each for each in kept if each.by == site and not each.is_automatic)
        found = tuple(Revocation(each.name, each.reason) for each in by_people)
    return found, problem


def last_known_revocations(
    own: Sequence[Revocation], kept: Sequence[RevocationInEffect], site: SiteName
) -> tuple[RevocationInEffect, ...]:
    """What is revoked in a run that is not served, by name: by this site's annotation (`own`), and
    as the status (`kept`) has it of other sites and of quarantines."""
    given = {each.name for each in own}
    here = (
        RevocationInEffect(each.name, each.reason, by=site) for each in own if not each.is_lifted
    )
    there = (
        each for each in kept if each.by != site or (each.is_automatic and each.name not in given)
    )
    return tuple(sorted((*here, *there), key=lambda each: (each.name, each.by)))

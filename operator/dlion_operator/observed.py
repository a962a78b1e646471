"""What the operator sees of one job before it decides, and how Kubernetes' objects are read.

Pure views over documents of the API; made by `reconcile`, read by `decide`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.endings import EndReport
from dlion_api.names import SiteName
from dlion_api.status import LinkStatus, Reason, TrainerStatus
from dlion_operator.attempts import Unmade
from dlion_operator.job_authority import NamedAuthority
from dlion_operator.job_view import moment
from dlion_operator.last_words import last_words
from dlion_operator.node_states import NodeState

Document = Mapping[str, Any]
Missing = tuple[str, int]
"""A pod that is not there: of which Job or Deployment, and its index."""
Unready = tuple[str, str]
"""A pod that runs and does not serve: its uid, and since when, as its node says."""

KNOWN_AFTER_S = 45.0
"""After this an operator that has started anew has heard from every worker that is there."""

_BROKEN_WAITING = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
     "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
     "CrashLoopBackOff"}
)  # fmt: skip
_FAILURE_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)
_IMAGE_WAITING = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)


_POLICY_WORDS = re.compile(r"ValidatingAdmissionPolicy|admission webhook .+ denied the request")
"""As the API server words the answers of its admission plugins, whatever their code."""


@dataclass(frozen=True)
class RemoteView:
    """What is known of another site's part in a run."""

    is_reachable: bool = False
    """Whether its operator is heard."""
    heartbeat_age_s: float | None = None
    """Since anything was heard of it; None: nothing ever was."""
    problem: str = ""
    """What stands in the way, for people; empty: nothing."""
    has_run: bool = False
    """Whether it has said that it serves this run."""
    knows_all: bool = False
    """Whether it has heard from every worker that is there."""
    agrees: bool = True
    """Whether its manifest is the one here."""
    spec_hash: str = ""
    workers: int | None = None
    """Those that it wants now; None: as the manifest here has it."""
    iteration: int = 0
    samples_per_s: float = 0.0


@dataclass(frozen=True)
class RunView:
    """What the coordinator knows of a run that it serves."""

    open_s: float
    """How long it has served this run."""
    ready: Mapping[SiteName, int] = field(default_factory=dict)
    """Workers that have joined and are there, by site."""
    away_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since a worker was seen to be there, by its name; those never seen are missing."""
    training: bool = False
    gathered_s: float = 0.0
    """How long all workers have been there, and none has begun to train; 0: that is not so."""
    stop_reason: str = ""
    """Why the run is to end, or has ended; empty: it goes on."""
    trainer_status: TrainerStatus | None = None
    steps_per_second: str = ""
    links: LinkStatus | None = None
    iteration: int = 0
    """Of this site's foremost worker."""
    samples_per_s: float = 0.0
    """Of this site's workers."""
    linked: Mapping[SiteName, int] = field(default_factory=dict)
    """Workers with whom some worker here is linked, by site."""
    remote: Mapping[SiteName, RemoteView] = field(default_factory=dict)
    """The other sites of the manifest; empty where this site knows of no others."""
    drift: str = ""
    """Where the sites' manifests differ; empty: nowhere, as far as is known."""
    bundles: Mapping[SiteName, bytes] = field(default_factory=dict)
    """By which the workers of each site are known, where the job names an authority."""


NOTHING_KNOWN = RunView(open_s=0.0)


@dataclass(frozen=True)
class Refusal:
    """A child that the API server refuses. The operator tries again, with back-off."""

    message: str
    code: int
    """Of the answer: 400, 403, 404, 422 and the like."""

    @property
    def reason(self) -> Reason:
        """What the refusal is about: an admission policy, a right or quota, or the manifest."""
        if _POLICY_WORDS.search(self.message):
            return Reason.POLICY_DENIED
        return Reason.FORBIDDEN if self.code in (403, 404) else Reason.INVALID_SPEC


@dataclass(frozen=True)
class Observed:
    """One job and everything that belongs to it, at one moment."""

    document: Document
    jobs: Sequence[Document]
    """Its Jobs, of any run."""
    pods: Sequence[Document]
    """Its pods, of any run."""
    services: Sequence[Document]
    """Its Services, of any run."""
    now: datetime
    authority_pem: str
    run: RunView | None = None
    elsewhere: RunView = NOTHING_KNOWN
    """What other sites say of the run, where it is not served here."""
    refused: Refusal | None = None
    """Of a child of this run, where the API server will not have it."""
    unmade: Mapping[str, Unmade] = field(default_factory=dict)
    """By the name of a worker's Service, what of it or of its routes could not be made."""
    authority: NamedAuthority | None = None
    """What there is of the authority that the job names; None: it names none."""
    hindrance: str = ""
    """What has kept the operator for a while from doing what this job needs; empty: nothing."""
    missing_s: Mapping[Missing, float] = field(default_factory=dict)
    """Seconds that this operator has seen each pod missing that there should be (`absences`)."""
    leaving: Sequence[Document] = ()
    """Pods of this job that are to go, of any run, whether their Jobs are there or not."""
    terminating_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that this operator has seen each of these waiting to go, by its uid."""
    unready_s: Mapping[Unready, float] = field(default_factory=dict)
    """Seconds that this operator has seen each keeper's pod run and not serve (`delays`)."""
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    """Of nodes whose pods should be gone by now, by name (`tidying.overdue`)."""
    keeper: Document | None = None
    """The keeper's Deployment."""


@dataclass(frozen=True)
class Trouble:
    """Why a pod does not run."""

    reason: Reason
    message: str


class PodView:
    """One pod of ours."""

    def __init__(self, document: Document) -> None:
        self.document = document
        metadata = document["metadata"]
        self.name = str(metadata["name"])
        self.uid = str(metadata.get("uid", ""))
        self.labels: Mapping[str, str] = metadata.get("labels") or {}
        self.annotations: Mapping[str, str] = metadata.get("annotations") or {}
        self.deleted_at = moment(metadata.get("deletionTimestamp"))
        """When its grace is over by the API server's clock; None: nobody wants it gone."""
        self._status: Document = document.get("status") or {}

    @property
    def worker(self) -> str:
        """Short name for people: group and index."""
        group, index = self.labels.get(names.GROUP_LABEL), self.labels.get(names.INDEX_LABEL)
        return self.name if group is None or index is None else f"{group}-{index}"

    @property
    def index(self) -> int | None:
        """Of its worker within the group; None: it has none."""
        text = str(self.labels.get(names.INDEX_LABEL, ""))
        return int(text) if text.isdecimal() else None

    @property
    def failures(self) -> int:
        """How often pods of its index had failed before it."""
        counts = (str(self.annotations.get(name, "")) for name in _FAILURE_COUNTS)
        return sum(int(count) for count in counts if count.isdecimal())

    @property
    def grace_s(self) -> float:
        """Seconds that it has to end in, once somebody wants it gone."""
        return float(self.document["metadata"].get("deletionGracePeriodSeconds") or 0)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def containers_ended(self) -> bool:
        """Whether its node has said that all of its containers have ended."""
        states = [status.get("state") or {} for status in self._container_statuses()]
        return bool(states) and all("terminated" in state for state in states)

    @property
    def node_address(self) -> str:
        """Of the node that it is on; empty: it is on none yet."""
        return str(self._status.get("hostIP") or "")

    @property
    def phase(self) -> str:
        return str(self._status.get("phase", "Pending"))

    @property
    def trainer_exit(self) -> int | None:
        """Its trainer's exit code, once it has ended."""
        for status in self._status.get("containerStatuses") or ():
            if status.get("name") == names.TRAINER_CONTAINER:
                ended = (status.get("state") or {}).get("terminated") or {}
                return ended.get("exitCode")
        return None

    @property
    def disruption(self) -> str:
        """Why it was taken from its node; empty: it was not."""
        for condition in self._conditions("DisruptionTarget"):
            if condition.get("status") == "True":
                return f"{condition.get('reason', '')}: {condition.get('message', '')}"
        return ""

    def failed_by_its_node(self, now: datetime) -> Document:
        """Its status, told in place of a node that does not answer."""
        others = [
            c for c in self._status.get("conditions") or () if c["type"] != "DisruptionTarget"
        ]
        lost = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "NodeLost",
            "message": "DLion: its node does not answer",
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return {"phase": "Failed", "conditions": [*others, lost]}

    def condition(self, type_: str) -> Document:
        """That condition; empty where it has none."""
        return next(self._conditions(type_), {})

    @property
    def runs_since(self) -> datetime | None:
        """When its trainer's container was started; None: it does not run."""
        for status in self._status.get("containerStatuses") or ():
            if status.get("name") == names.TRAINER_CONTAINER:
                running = (status.get("state") or {}).get("running") or {}
                return moment(running.get("startedAt"))
        return None

    @property
    def unready(self) -> Unready | None:
        """That it runs and does not serve; None: it serves, or does not run yet.

        One that has served for a moment, whoever saw it, is another.
        """
        ready = self.condition("Ready")
        if self.phase != "Running" or ready.get("status") != "False":
            return None
        return self.uid, str(ready.get("lastTransitionTime", ""))

    def trouble(self) -> Trouble | None:
        """Why it does not run, where waiting alone may not help."""
        if self.deleted_at is not None or self.is_over:
            return None
        for condition in self._conditions("PodScheduled"):
            if condition.get("reason") == "Unschedulable":
                return Trouble(
                    Reason.UNSCHEDULABLE, f"{self.worker}: {condition.get('message', '')}"
                )
        for status in self._container_statuses():
            waiting = (status.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") in _BROKEN_WAITING:
                reason = waiting["reason"]
                words = f"{self.worker}, container {status.get('name')}: {reason}"
                words += f": {waiting['message']}" if waiting.get("message") else ""
                is_image = reason in _IMAGE_WAITING
                return Trouble(
                    Reason.IMAGE_UNAVAILABLE if is_image else Reason.CONTAINER_BROKEN, words
                )
        return None

    def _container_statuses(self) -> Iterator[Document]:
        yield from self._status.get("initContainerStatuses") or ()
        yield from self._status.get("containerStatuses") or ()

    def _conditions(self, type_: str) -> Iterator[Document]:
        return (c for c in self._status.get("conditions") or () if c.get("type") == type_)

    @property
    def made_at(self) -> datetime | None:
        """When it was made."""
        return moment(self.document["metadata"].get("creationTimestamp"))

    @property
    def failure(self) -> str:
        """In one line, how it failed; empty: it did not."""
        if self.phase != "Failed":
            return ""
        if self.disruption:
            return f"{self.worker}: {self.disruption}"
        code = self.trainer_exit
        if code is None:
            reason, message = self._status.get("reason", ""), self._status.get("message", "")
            return f"{self.worker}: {reason} {message}"
        return f"{self.worker}: trainer ended with {last_words(code, self._last_lines())}"

    @property
    def end_report(self) -> EndReport | None:
        """What its trainer reported when it ended in order; None: it has not, or no report."""
        if self.phase != "Succeeded":
            return None
        return EndReport.from_json(self._termination_message())

    def _last_lines(self) -> list[str]:
        """What its trainer and the supervisor, in JSON, said last."""
        return [line for line in self._termination_message().splitlines() if line.strip()]

    def _termination_message(self) -> str:
        for status in self._status.get("containerStatuses") or ():
            ended = (status.get("state") or {}).get("terminated") or {}
            if status.get("name") == names.TRAINER_CONTAINER:
                return str(ended.get("message") or "")
        return ""

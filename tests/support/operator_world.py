"""Documents as an API server stores them, for tests of the operator's decisions.

They are made from the operator's own documents with the fields that Kubernetes would add.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from dlion_api import cluster_names as names
from dlion_api.document import to_document
from dlion_api.endings import EndReport
from dlion_api.names import JobKey, SiteName
from dlion_api.spec import load_job
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.model.durations import DurationTracker
from dlion_operator.model.manifest_digest import manifest_digest
from dlion_operator.model.settings import CoordinatorSettings, Images, Settings
from dlion_operator.model.site_runtime import RuntimeState
from dlion_operator.model.workload_view import QueueState
from dlion_operator.plan.decide import decide
from dlion_operator.plan.decisions import Apply, Decision
from dlion_operator.plan.missing_pods import missing_pods
from dlion_operator.plan.observed import MissingPod, Observed, RunView, TerminatingPods, UnreadyPod
from dlion_operator.plan.runs import groups_of
from dlion_operator.plan.startup_delays import unready_keepers

Document = dict[str, Any]

START = datetime(2026, 1, 31, 12, tzinfo=UTC)
SETTINGS = Settings(
    site="plant-a",
    images=Images(worker="dlion/worker:1", sidecar="dlion/sidecar:1"),
    coordinator=CoordinatorSettings(address="dlion-operator.dlion-system.svc:7443"),
)


TRAINER: Document = {
    "program": {"builtin": "digits"},
    "dataset": {"name": "digits"},
    "stop": {"maxSteps": 100},
}
STAGED: Document = {
    "exchange": {"topology": "staged", "policy": "staged"},
    "trainer": {**TRAINER, "encoder": "encoder.keras"},
}
"""Fields of a job in which only the first worker trains."""


def dlion_job(groups: dict[str, int] | None = None, **spec: Any) -> Document:
    """A DLionJob at one site with these groups, as an API server stores it: with defaults."""
    document: Document = {
        "apiVersion": "dlion.dev/v1alpha1",
        "kind": "DLionJob",
        "metadata": {"name": "digits", "namespace": "default"},
        "spec": {
            "sites": [
                {
                    "name": "plant-a",
                    "groups": [
                        {"name": name, "workers": count}
                        for name, count in (groups or {"small": 2}).items()
                    ],
                }
            ],
            "trainer": TRAINER,
            **spec,
        },
    }
    filled = to_document(load_job(document))
    filled["metadata"] = {**document["metadata"], "uid": "u-1", "generation": 1}
    filled["status"] = {"observedGeneration": -1}
    return filled


class World:
    """One job and its children over time. `look` is one decision, whose status is stored."""

    def __init__(self, document: Document, settings: Settings = SETTINGS) -> None:
        self.document = document
        self.settings = settings
        self.jobs: dict[str, Document] = {}
        self.pods: dict[str, Document] = {}
        self.services: list[Document] = []
        self.run: RunView | None = None
        self.queue: QueueState | None = None
        self.runtime = RuntimeState()
        self.keeper: Document | None = None
        """The keeper's Deployment."""
        self.now = START
        self._missing: DurationTracker[MissingPod] = DurationTracker()
        self._terminating: DurationTracker[str] = DurationTracker()
        self._unready: DurationTracker[UnreadyPod] = DurationTracker()

    def observed(self) -> Observed:
        """The operator's present observation."""
        now_s = (self.now - START).total_seconds()
        jobs, pods = list(self.jobs.values()), list(self.pods.values())
        terminating = [pod for pod in pods if pod["metadata"].get("deletionTimestamp")]
        metadata, run_id = self.document["metadata"], str(self.document["spec"].get("runId", ""))
        key = JobKey(metadata["namespace"], metadata["name"], run_id)
        return Observed(
            missing_s=self._missing.of(missing_pods(key, jobs, pods), now_s),
            terminating=TerminatingPods(
                terminating,
                self._terminating.of([pod["metadata"]["uid"] for pod in terminating], now_s),
            ),
            unready_s=self._unready.of(unready_keepers(pods), now_s),
            document=self.document,
            jobs=jobs,
            pods=pods,
            services=self.services,
            now=self.now,
            authority_pem="PEM",
            run=self.run,
            queue=self.queue,
            runtime=self.runtime,
            keeper=self.keeper,
        )

    def look(self, **changes: Any) -> Decision:
        """The operator's decision; `changes` apply to its observation."""
        decision = decide(replace(self.observed(), **changes), self.settings)
        if decision.status is not None:
            self.document["status"] = dict(decision.status)
        return decision

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self.now += timedelta(seconds=seconds)

    def expose(self, decision: Decision) -> None:
        """Create the workers' Services of a decision, with node ports as an API server chooses
        them: 30000 on."""
        applied = [a.document for a in decision.actions if isinstance(a, Apply)]
        self.services = [copy.deepcopy(d) for d in applied if d["spec"].get("type")]
        numbers = itertools.count(30000)
        for service in self.services:
            service["metadata"]["uid"] = f"uid-{service['metadata']['name']}"
            for port in service["spec"]["ports"] if service["spec"]["type"] != "ClusterIP" else ():
                port["nodePort"] = next(numbers)

    def make_jobs(self) -> None:
        """Create the Jobs, each with its running pods."""
        job = load_job(self.document).with_group_ranks()
        settings = replace(self.settings, runtime=self.runtime.runtime)
        for group in groups_of(job, self.settings.site):
            made = copy.deepcopy(worker_job(job, group, settings, {"uid": "u-1", "name": "digits"}))
            made["metadata"] |= {
                "uid": f"job-{group.name}", "creationTimestamp": stamp(self.now)
            }  # fmt: skip
            digest = manifest_digest(job)
            made["metadata"]["annotations"][names.MANIFEST_ANNOTATION] = digest
            made["status"] = {"startTime": stamp(self.now)}
            self.jobs[group.name] = made
            for index in range(group.workers):
                self.pods[f"{group.name}-{index}"] = self._pod(made, index)
        self.make_keeper()

    def make_keeper(self) -> None:
        """Create the keeper's pod, which serves."""
        key = load_job(self.document).key
        labels = names.run_labels(key, self.settings.site) | {names.COMPONENT_LABEL: names.KEEPER}
        self.pods["keeper"] = {
            "metadata": {
                "name": f"{names.keeper_name(key)}-5f-abcde",
                "namespace": "default",
                "uid": "pod-keeper",
                "labels": labels,
                "creationTimestamp": stamp(self.now),
            },
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }

    def _pod(self, job: Document, index: int) -> Document:
        labels = dict(job["spec"]["template"]["metadata"]["labels"])
        return {
            "metadata": {
                "name": f"{job['metadata']['name']}-{index}-abcde",
                "namespace": "default",
                "uid": f"pod-{job['metadata']['name']}-{index}",
                "labels": labels | {names.INDEX_LABEL: str(index)},
                "creationTimestamp": stamp(self.now),
            },
            "status": {"phase": "Running"},
        }

    def train(self, *, ready: int | None = None) -> None:
        """Let the workers join and train."""
        count = len(self.pods.keys() - {"keeper"}) if ready is None else ready
        self.run = RunView(
            open_s=3600.0, ready={SiteName(self.settings.site): count}, training=True
        )

    def end(self, group: str, *, failed: str = "", exit_code: int = 0) -> None:
        """End that group's Job; `failed` are the indexes that did not succeed."""
        job = self.jobs[group]
        total = job["spec"]["completions"]
        lost = len(failed.split(",")) if failed else 0
        kind = "Failed" if lost else "Complete"
        good = [str(index) for index in range(total) if str(index) not in failed.split(",")]
        job["status"] |= {
            "succeeded": total - lost,
            "completedIndexes": ",".join(good),
            "failedIndexes": failed,
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": stamp(self.now)}],
        }
        for index in range(total):
            bad = str(index) in failed.split(",")
            self.fail(group, index, exit_code) if bad else self.succeed(group, index)

    def fail(self, group: str, index: int, exit_code: int, message: str = "") -> None:
        """End that pod's trainer with that exit code."""
        ended = {"exitCode": exit_code, "message": message}
        self.pods[f"{group}-{index}"]["status"] = {
            "phase": "Failed",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
        }

    def fail_download(self, group: str, index: int, exit_code: int) -> None:
        """Let the download of that pod's data set fail."""
        ended = {"exitCode": exit_code, "message": "d.zip: refused"}
        name = names.DATASET_INITIALIZER
        self.pods[f"{group}-{index}"]["status"] = {
            "phase": "Failed",
            "initContainerStatuses": [{"name": name, "state": {"terminated": ended}}],
        }

    def succeed(self, group: str, index: int, report: EndReport | None = None) -> None:
        """End that pod's trainer successfully, with that report."""
        ended = {"exitCode": 0, "message": report.to_json() if report else ""}
        self.pods[f"{group}-{index}"]["status"] = {
            "phase": "Succeeded",
            "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}],
        }

    def restart(self) -> None:
        """Continue with a new operator that has received nothing yet."""
        self.run = None
        self._missing, self._terminating, self._unready = (
            DurationTracker(),
            DurationTracker(),
            DurationTracker(),
        )

    def wait_for(self, group: str, index: int, reason: str, message: str = "") -> None:
        """Let that pod's trainer wait, for that reason."""
        waiting = {"reason": reason, "message": message}
        self.pods[f"{group}-{index}"]["status"] = {
            "phase": "Pending",
            "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}],
        }


def stamp(moment: datetime) -> str:
    """A time as Kubernetes writes it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition_statuses(decision: Decision) -> dict[str, str]:
    """Each condition's status."""
    assert decision.status is not None
    return {each["type"]: each["status"] for each in decision.status["conditions"]}


def ready_reason(decision: Decision) -> tuple[str, str]:
    """Reason and message of the condition Ready."""
    assert decision.status is not None
    ready = next(each for each in decision.status["conditions"] if each["type"] == "Ready")
    return ready["reason"], ready["message"]

"""Reads a pod's document; any field may be missing or of another type.

Called by the commands that show pods, and by `dlion_cli.findings`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from dlion_api import cluster_names as names
from dlion_api.errors import SpecError
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.terminal.plain_table import plain_table
from dlion_cli.views.job_status import JobStatus, age_of, text

_STYLES = {
    "Running": "green",
    "Completed": "cyan",
    "Pending": "yellow",
    "ContainerCreating": "yellow",
    "Terminating": "yellow",
    "PodInitializing": "yellow",
    "NotReady": "yellow",
    "SchedulingGated": "yellow",
}
_INITIALIZING = re.compile(r"Init:\d+/\d+")


@dataclass(frozen=True)
class ContainerStatus:
    """The status of one container."""

    name: str
    is_ready: bool
    is_started: bool
    """Whether it runs, and its startup probe has succeeded."""
    restarts: int
    waiting: Mapping[str, Any]
    """Reason and message if it waits; else empty."""
    terminated: Mapping[str, Any]
    """How it ended, if it has; else empty."""
    last: Mapping[str, Any]
    """How its previous instance ended, if there was one."""
    started: str
    """When it started; empty if it does not run."""


class PodStatus:
    """The content of one pod's document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        metadata = mapping_of(document.get("metadata"))
        spec = mapping_of(document.get("spec"))
        self._status = status = mapping_of(document.get("status"))
        labels = mapping_of(metadata.get("labels"))
        self.name = text(metadata.get("name"))
        self.created = str(metadata.get("creationTimestamp", ""))
        self.deleted = str(metadata.get("deletionTimestamp") or "")
        """When it will be removed; empty if it is not being deleted."""
        self.node = text(spec.get("nodeName"), "")
        self.phase = str(status.get("phase") or "Pending")
        self.reason = text(status.get("reason"), "")
        self.message = text(status.get("message"), "")
        self.run_id = str(labels.get(names.RUN_LABEL, ""))
        self.site = text(labels.get(names.SITE_LABEL), "")
        self.is_keeper = labels.get(names.COMPONENT_LABEL) == names.KEEPER
        self.group = text(labels.get(names.GROUP_LABEL), "")
        index = str(labels.get(names.INDEX_LABEL, ""))
        self.index = int(index[:9]) if index.isascii() and index.isdecimal() else None
        self.owners = {text(o.get("name")) for o in mappings_in(metadata.get("ownerReferences"))}

    @property
    def worker(self) -> str:
        """Group and index, as in logs; the keeper's role; else the pod's name."""
        if self.is_keeper:
            return names.KEEPER
        return self.name if self.index is None or not self.group else f"{self.group}-{self.index}"

    @property
    def is_finished(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def containers(self) -> list[ContainerStatus]:
        """Its containers, those that initialise it first."""
        return [
            *self._containers("initContainerStatuses"), *self._containers("containerStatuses")
        ]  # fmt: skip

    def _containers(self, kind: str) -> list[ContainerStatus]:
        return [_container(one) for one in mappings_in(self._status.get(kind))]

    @property
    def is_initializing(self) -> bool:
        """Whether it downloads its data or model."""
        initializers = (names.DATASET_INITIALIZER, names.MODEL_INITIALIZER)
        return any(each.name in initializers and each.started for each in self.containers)

    @property
    def restarts(self) -> int:
        """Restarts of its containers."""
        return sum(container.restarts for container in self.containers)

    def condition(self, type_: str) -> Mapping[str, Any]:
        """One condition; empty if there is none."""
        conditions = mappings_in(self._status.get("conditions"))
        return next((each for each in conditions if each.get("type") == type_), {})

    @property
    def state(self) -> str:
        """One word, mostly as in kubectl's column STATUS; a reason of the whole pod comes first.

        Source: Kubernetes, `printPod` in pkg/printers/internalversion.
        """
        if self.deleted and not self.is_finished:
            return "Terminating"
        if self.reason:
            return self.reason
        initializing = self._initializing()
        if initializing and self.condition("Initialized").get("status") != "True":
            return initializing
        containers = self._containers("containerStatuses")
        for container in containers:
            if container.waiting and (reason := text(container.waiting.get("reason"), "")):
                return reason
        ended = [container for container in containers if container.terminated]
        for container in ended:
            if container.terminated.get("exitCode") != 0:
                return _ending(container) or self.phase
        if ended and self.phase == "Running":  # it ends, or a container beside it does not
            return "Completed" if len(ended) == len(containers) else "NotReady"
        if self.condition("PodScheduled").get("reason") == "SchedulingGated":
            return "SchedulingGated"
        return "Completed" if self.phase == "Succeeded" else text(self.phase)

    def _initializing(self) -> str:
        """The first initializer that has neither succeeded nor, as a sidecar, started; empty: all
        have."""
        listed = mappings_in(mapping_of(self.document.get("spec")).get("initContainers"))
        sidecars = {each.get("name") for each in listed if each.get("restartPolicy") == "Always"}
        for place, container in enumerate(self._containers("initContainerStatuses")):
            if container.terminated.get("exitCode") == 0:
                continue
            if container.is_started and container.name in sidecars:
                continue
            reason = _ending(container) or text(container.waiting.get("reason"), "")
            named = reason and reason != "PodInitializing"
            return f"Init:{reason}" if named else f"Init:{place}/{len(listed)}"
        return ""


def _ending(container: ContainerStatus) -> str:
    """How it failed, in a word; empty if it has not, or that is not known."""
    code = container.terminated.get("exitCode")
    known = "" if code is None else f"ExitCode:{text(code)}"
    if signal := container.terminated.get("signal"):
        known = f"Signal:{text(signal)}"
    return text(container.terminated.get("reason"), known)


def _container(status: Mapping[str, Any]) -> ContainerStatus:
    state = mapping_of(status.get("state"))
    restarts = status.get("restartCount")
    return ContainerStatus(
        name=text(status.get("name")),
        is_ready=status.get("ready") is True,
        is_started=status.get("started") is True,
        restarts=restarts if isinstance(restarts, int) else 0,
        waiting=mapping_of(state.get("waiting")),
        terminated=mapping_of(state.get("terminated")),
        last=mapping_of(mapping_of(status.get("lastState")).get("terminated")),
        started=str(mapping_of(state.get("running")).get("startedAt") or ""),
    )


def pods_of_run(pods: Iterable[Mapping[str, Any]], run_id: str) -> list[PodStatus]:
    """The pods of that run: workers by group and index, then the keeper."""
    statuses = [pod for pod in map(PodStatus, pods) if pod.run_id == run_id]
    return sorted(
        statuses, key=lambda pod: (pod.is_keeper, pod.group, pod.index or 0, pod.created, pod.name)
    )


def worker_ranks(document: Mapping[str, Any]) -> dict[tuple[str, str, int], int]:
    """The rank of each worker of the manifest, by site, group and index; empty if it is invalid.

    As a new run in a cluster counts them. A run of an earlier release may count otherwise.
    """
    from dlion_api.spec import load_job  # it takes longer to import than all else here

    try:
        job = load_job(dict(document)).with_group_ranks()
    except SpecError:
        return {}
    return {(each.site, each.group, each.index): int(each.rank) for each in job.workers()}


def pods_table(
    job: JobStatus, pods: Sequence[PodStatus], why: Mapping[str, str], now: datetime
) -> Table:
    """One row per pod; `why` has by the pod's name why it does not run."""
    table = plain_table(
        "POD", "WORKER", "RANK", "NODE", "STATE", "RESTARTS", "AGE", folded="WHY NOT RUNNING",
        left_out=("RANK", "NODE", "AGE", "WORKER", "RESTARTS"),
    )  # fmt: skip
    ranks = worker_ranks(job.document)
    for pod in pods:
        rank = None if pod.index is None else ranks.get((pod.site, pod.group, pod.index))
        before = (pod.name, pod.worker, text(rank), text(pod.node))
        after = (str(pod.restarts), age_of(pod.created, now), why.get(pod.name, ""))
        table.add_row(*map(Text, before), _styled(pod.state), *map(Text, after))
    return table


def _styled(state: str) -> Text:
    style = "yellow" if _INITIALIZING.fullmatch(state) else _STYLES.get(state, "bold red")
    return Text(state, style=style)

"""The `DLionJob` manifest as a whole: rules across its parts, its workers and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from dlion_api.bounds import (
    INT32_MAX,
    JOB_NAME_LENGTH,
    LABEL_FORM,
    MAX_SITES,
    MAX_WORKERS_PER_GROUP,
    OPTIONAL_OBJECT_NAME_FORM,
    RUN_ID_LENGTH,
    SERVICE_LABEL_FORM,
)
from dlion_api.document import Limits, Rule, TransitionRule, optional, parse, setting, to_document
from dlion_api.errors import Problem
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.spec import ranks
from dlion_api.spec.failures import FAILURE_RULES, MAX_RULES, FailureRule
from dlion_api.spec.node_policies import NodePolicies
from dlion_api.spec.policies import (
    GROWING_BATCH_POLICIES,
    GROWING_DATA_FRACTION,
    Batching,
    Exchange,
    GlobalBatchSize,
    KnowledgeTransfer,
    Synchronization,
)
from dlion_api.spec.privacy import PRIVACY_RULES
from dlion_api.spec.robustness import ROBUSTNESS_RULES
from dlion_api.spec.running import Checkpoint, Network, Tls
from dlion_api.spec.sites import WORKERS_CEL, LabelValue, Site, workers_of
from dlion_api.spec.topologies import TOPOLOGY_RULES
from dlion_api.spec.trainer import Trainer
from dlion_api.spec.transitions import JOB_TRANSITIONS

AnnotationValue = Annotated[str, Limits(max_length=256 * 1024)]
"""The API server's limit for all annotations of an object; `kubectl apply` stores the whole
manifest in one."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Identifies the job; other metadata that a cluster adds is ignored."""

    name: str = setting(
        "name, the same at every site.", **SERVICE_LABEL_FORM, max_length=JOB_NAME_LENGTH
    )
    namespace: str = setting(
        "namespace, the same at every site.",
        default="default",
        **LABEL_FORM,
        max_length=63,
    )
    labels: Mapping[str, LabelValue] = setting("labels.", default={})
    annotations: Mapping[str, AnnotationValue] = setting("annotations.", default={})

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers",
            "generateName", "generation", "managedFields", "ownerReferences", "resourceVersion",
            "selfLink", "uid",
        }
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is trained, where, and how."""

    run_id: str = setting(
        "name of this run, the same at every site. After the job's end another name starts a new"
        " run.",
        default="1",
        min_length=1,
        **LABEL_FORM,
        max_length=RUN_ID_LENGTH,
    )
    sites: tuple[Site, ...] = setting(
        "where the job runs; their order determines ranks.",
        key="name",
        min_items=1,
        max_items=MAX_SITES,
    )
    min_sites: int = setting(
        "quorum: with fewer sites the job waits, and the smaller side of a partition pauses.",
        default=1,
        minimum=1,
        maximum=MAX_SITES,
    )
    trainer: Trainer = setting("the model, its data, and how it is trained.")
    batching: Batching = setting("how the global batch is divided.", default=Batching())
    exchange: Exchange = setting("what workers exchange.", default=Exchange())
    synchronization: Synchronization = setting(
        "which peers a worker waits for.", default=Synchronization()
    )
    knowledge_transfer: KnowledgeTransfer = setting(
        "how replicas take weights of the best one.", default=KnowledgeTransfer()
    )
    network: Network = setting("how workers reach each other.", default=Network())
    tls: Tls = setting("where certificates come from.", default=Tls())
    checkpoint: Checkpoint = setting("how often state is saved.", default=Checkpoint())
    node_policies: NodePolicies = setting(
        "how workers respect other needs of their machines. A change takes effect in the next run.",
        default=NodePolicies(),
        hashed=False,
    )
    suspend: bool = setting(
        "stop the workers and keep the job; dlion run refuses it.",
        default=False,
        hashed=False,
    )
    managed_by: str = setting(
        "the job's controller; with another value DLion's operator starts no pods.",
        default="dlion.dev/operator",
        pattern=r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?",
        pattern_description="a domain name, a slash, a name",
        max_length=63,
    )
    active_deadline_seconds: int | None = optional(
        "a run that takes longer fails after saving its model. The time restarts with a resume.",
        minimum=1,
        maximum=INT32_MAX,
        unit="seconds",
        hashed=False,
    )
    start_deadline_seconds: int | None = optional(
        "after this time a ready worker starts without others, if minSites sites are ready."
        " Default: it waits for all.",
        minimum=1,
        maximum=INT32_MAX,
        unit="seconds",
        hashed=False,
    )
    ttl_seconds_after_finished: int | None = optional(
        "after this time a finished job's pods, services and secrets are deleted; the job stays.",
        minimum=0,
        maximum=INT32_MAX,
        unit="seconds",
        hashed=False,
    )
    max_restarts: int = setting(
        "restarts of one worker before failurePolicy applies to it.",
        default=10,
        minimum=0,
        maximum=1000,
    )
    runtime: str = setting(
        "DLionRuntime of each site: image, podTemplate and limits by its administrators. Empty:"
        " the site's default; dlion run ignores it. A change takes effect in the next run.",
        default="",
        **OPTIONAL_OBJECT_NAME_FORM,
        hashed=False,
    )
    failure_policy: Literal["Continue", "Fail"] = setting(
        "when a worker has failed and is not restarted: continue while the quorum holds, or fail"
        " the job.",
        default="Continue",
    )
    failure_rules: tuple[FailureRule, ...] = setting(
        "what happens after a worker's end; the first matching rule counts. Without a match crashed"
        " and disrupted workers restart, the latter without counting; others fail.",
        default=(),
        max_items=MAX_RULES,
    )
    max_retries: int = setting(
        "how often a cluster retries a failed run from its checkpoints, after 10 s to 10 minutes."
        " Not after errors of manifest, data or program, nor FailRun.",
        default=0,
        minimum=0,
        maximum=100,
        hashed=False,
    )
    pod_template: Mapping[str, Any] | None = optional(
        "metadata and spec merged into the workers' pods; the keeper takes what schedules its"
        " own. A change takes effect in the next run.",
        hashed=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.minSites <= size(self.sites)",
            message="minSites must not be above the number of sites",
            holds=lambda it: it.min_sites <= len(it.sites),
            reads=("minSites", "sites"),
        ),
        Rule(
            cel=f"self.batching.globalBatchSize.initial >= {WORKERS_CEL}",
            message="the initial global batch needs a sample for every worker",
            holds=lambda it: it.batching.global_batch_size.initial >= workers_of(it.sites),
            reads=("batching.globalBatchSize.initial", "sites"),
        ),
        Rule(
            cel=f"self.synchronization.backupWorkers < {WORKERS_CEL}",
            message="backupWorkers must be below the number of workers",
            holds=lambda it: it.synchronization.backup_workers < workers_of(it.sites),
            reads=("synchronization.backupWorkers", "sites"),
        ),
        Rule(
            cel="self.network.exposure == 'PodNetwork' || self.tls.mode != 'Disabled'",
            message="exposure beyond the pod network needs TLS, else anyone could take part",
            holds=lambda it: it.network.exposure == "PodNetwork" or it.tls.mode != "Disabled",
            reads=("network.exposure", "tls.mode"),
        ),
        Rule(
            cel="self.batching.policy != 'goodput' ||"
            " (self.synchronization.mode == 'synchronous' &&"
            " self.exchange.weighting == 'sample_mean' && (self.exchange.policy == 'full' ||"
            " (self.exchange.policy == 'dlion' && !self.exchange.prioritization &&"
            " self.exchange.propagation != 'selective')))",
            message="batching policy goodput needs the mean of whole gradients",
            holds=lambda it: it.batching.policy != "goodput" or _has_whole_mean(it),
            reads=(
                "batching.policy",
                "synchronization.mode",
                "exchange.weighting",
                "exchange.policy",
                "exchange.prioritization",
                "exchange.propagation",
            ),
            advice="Set exchange.policy: full (or dlion with prioritization: false, propagation:"
            " all), weighting: sample_mean, synchronization.mode: synchronous; or batching.policy:"
            " weighted.",
        ),
        Rule(
            cel="size(self.trainer.dataset.siteClasses) == 0 ||"
            " (size(self.trainer.dataset.siteClasses) == size(self.sites) &&"
            " self.sites.all(s, self.trainer.dataset.siteClasses.exists(c, c.site == s.name)))",
            message="siteClasses must name every site once",
            holds=lambda it: (
                not it.trainer.dataset.site_classes
                or sorted(c.site for c in it.trainer.dataset.site_classes)
                == sorted(site.name for site in it.sites)
            ),
            reads=("trainer.dataset.siteClasses", "sites"),
            advice="Give each of spec.sites its classes, or leave siteClasses out.",
        ),
        *TOPOLOGY_RULES,
        *ROBUSTNESS_RULES,
        *PRIVACY_RULES,
        *FAILURE_RULES,
    )

    @property
    def data_fraction(self) -> float:
        """Part of the batch divided by the workers' samples; the default depends on `watch`."""
        if self.batching.data_fraction is not None:
            return self.batching.data_fraction
        grows = self.trainer.dataset.watch and self.batching.policy != "even"
        return GROWING_DATA_FRACTION if grows else 0.0

    @property
    def global_batch_size(self) -> GlobalBatchSize:
        """The manifest's, with `growth` decided; its default depends on the policies."""
        size = self.batching.global_batch_size
        if size.growth is not None:
            return size
        grows = self.exchange.policy in GROWING_BATCH_POLICIES or self.batching.policy == "goodput"
        return replace(size, growth=grows)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that trains one model over several sites."""

    api_version: Literal["dlion.dev/v1alpha1"] = setting("version of this schema.")
    kind: Literal["DLionJob"] = setting("kind of document.")
    metadata: Metadata = setting("what identifies the job.")
    spec: Spec = setting("what is trained, where, and how.")

    ignored: ClassVar[frozenset[str]] = frozenset({"status"})
    transitions: ClassVar[tuple[TransitionRule, ...]] = JOB_TRANSITIONS

    @property
    def key(self) -> JobKey:
        """Identity of this run, equal at every site."""
        return JobKey(self.metadata.namespace, self.metadata.name, self.spec.run_id)

    @property
    def may_grow(self) -> bool:
        """Whether ranks allow workers to be added during the run (`spec.ranks`)."""
        return self.metadata.annotations.get(ranks.RANKS_ANNOTATION) == ranks.BY_GROUP

    def with_group_ranks(self) -> Job:
        """Return the job with ranks by group, for a cluster, if its exchange policy allows it.

        Other policies give ranks a meaning (neighbours, the server), so they stay counted.
        """
        if not self.spec.exchange.allows_new_workers:
            return self.with_counted_ranks()
        annotations = {**self.metadata.annotations, ranks.RANKS_ANNOTATION: ranks.BY_GROUP}
        return replace(self, metadata=replace(self.metadata, annotations=annotations))

    def with_counted_ranks(self) -> Job:
        """Return the job with counted ranks, as on one machine."""
        if not self.may_grow:
            return self
        annotations = {**self.metadata.annotations}
        del annotations[ranks.RANKS_ANNOTATION]
        return replace(self, metadata=replace(self.metadata, annotations=annotations))

    def workers(self) -> tuple[WorkerIdentity, ...]:
        """Return all workers of the manifest, by rank."""
        number = ranks.by_group if self.may_grow else ranks.counted
        return number(self.spec.sites)

    def worker(self, rank: Rank) -> WorkerIdentity:
        """Return the worker of that rank, including added ones if the job may grow.

        Raises: LookupError: There is none.
        """
        if self.may_grow:
            return ranks.by_group_at(self.spec.sites, rank)
        workers = self.workers()
        if not 0 <= rank < len(workers):
            raise LookupError(f"rank {rank}; allowed: 0 to {len(workers) - 1}")
        return workers[rank]

    def worker_at(self, site: SiteName, group: str, index: int) -> WorkerIdentity:
        """Return the worker with that index in its group, including added ones if the job may grow.

        Raises: LookupError: There is none; the message gives the allowed values.
        """
        sites = {each.name: each.groups for each in self.spec.sites}
        if (groups := sites.get(site)) is None:
            raise LookupError(f"no such site; allowed: {', '.join(sorted(sites))}")
        counts = {each.name: each.workers for each in groups}
        if group not in counts:
            raise LookupError(f"no such group; allowed: of {site}: {', '.join(sorted(counts))}")
        most = MAX_WORKERS_PER_GROUP if self.may_grow else counts[group]
        if not 0 <= index < most:
            has = "may have" if self.may_grow else "has"
            raise LookupError(
                f"the manifest {has} {most} workers in group {group} of site {site};"
                f" allowed: 0 to {most - 1}"
            )
        if self.may_grow:
            return ranks.by_group_in(self.spec.sites, site, group, index)
        return next(
            worker
            for worker in self.workers()
            if (worker.site, worker.group, worker.index) == (site, group, index)
        )

    def to_document(self) -> dict[str, Any]:
        """Return the manifest for JSON, with defaults filled in."""
        return to_document(self)

    def compared(self, *, without_defaults: bool = False) -> dict[str, Any]:
        """Return the part of the spec that must be equal at every site, with defaults.

        It lacks the fields declared `hashed=False`. `without_defaults` also omits fields with
        their default.
        """
        return to_document(self.spec, hashed_only=True, without_defaults=without_defaults)

    def hash(self) -> str:
        """Return the SHA-256 of the part that must be equal at every site (`compared`)."""
        document = self.compared()
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def _has_whole_mean(spec: Spec) -> bool:
    """Whether every update is the mean of all workers' whole gradients, weighted by samples."""
    exchange = spec.exchange
    is_whole = exchange.policy == "full" or (
        exchange.policy == "dlion"
        and not exchange.prioritization
        and exchange.propagation != "selective"
    )
    is_mean = exchange.weighting == "sample_mean" and spec.synchronization.mode == "synchronous"
    return is_whole and is_mean


def load_job(
    document: object,
    *,
    source: str = "",
    lines: Mapping[str, int] | None = None,
    unknown: list[Problem] | None = None,
) -> Job:
    """Parse a manifest. Raises: SpecError: lists all problems.

    `unknown` collects fields that this version does not know, which are then no error: an API
    server with a newer CRD fills them in.
    """
    return parse(Job, document, source=source, lines=lines, unknown=unknown)

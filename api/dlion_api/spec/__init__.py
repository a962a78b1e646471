"""The `DLionJob` manifest: one declaration gives its parser, CRD schema and reference.

Contents: the manifest's document classes, the rules over their fields, and what follows from a
manifest alone (ranks, hash). Not here: reading files, the status, any I/O.
"""

from dlion_api.spec.dataset import Dataset, SiteClasses
from dlion_api.spec.job import Job, Metadata, Spec, load_job
from dlion_api.spec.policies import (
    Batching,
    Exchange,
    GlobalBatchSize,
    KnowledgeTransfer,
    Synchronization,
)
from dlion_api.spec.ranks import BY_GROUP, RANKS_ANNOTATION
from dlion_api.spec.running import Checkpoint, Network, Tls
from dlion_api.spec.sites import Group, Resources, Site
from dlion_api.spec.trainer import ConfigMapKey, Evaluation, Optimizer, Program, Stop, Trainer

__all__ = [
    "BY_GROUP",
    "RANKS_ANNOTATION",
    "Batching",
    "Checkpoint",
    "ConfigMapKey",
    "Dataset",
    "Evaluation",
    "Exchange",
    "GlobalBatchSize",
    "Group",
    "Job",
    "KnowledgeTransfer",
    "Metadata",
    "Network",
    "Optimizer",
    "Program",
    "Resources",
    "Site",
    "SiteClasses",
    "Spec",
    "Stop",
    "Synchronization",
    "Tls",
    "Trainer",
    "load_job",
]

"""The manifests `DLionJob` and `DLionRuntime`: one declaration gives parser, CRD schema, reference.

Contents: the manifests' document classes, the rules over their fields, and what follows from a
manifest alone (ranks, hash). Not here: reading files, the status, any I/O.
"""

from dlion_api.spec.dataset import Dataset, SiteClasses
from dlion_api.spec.job import Job, Metadata, Spec, load_job
from dlion_api.spec.policies import Exchange, GlobalBatchSize
from dlion_api.spec.ranks import BY_GROUP, RANKS_ANNOTATION
from dlion_api.spec.runtime import Runtime, RuntimeLimits, RuntimeSpec
from dlion_api.spec.trainer import Optimizer, Program, Stop

__all__ = [
    "BY_GROUP",
    "RANKS_ANNOTATION",
    "Dataset",
    "Exchange",
    "GlobalBatchSize",
    "Job",
    "Metadata",
    "Optimizer",
    "Program",
    "Runtime",
    "RuntimeLimits",
    "RuntimeSpec",
    "SiteClasses",
    "Spec",
    "Stop",
    "load_job",
]

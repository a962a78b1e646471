"""What a job's objects in a cluster are called, labelled and mounted as.

Made by the operator, found again by the command line, read in the pods. Lengths are bounded by
`dlion_api.spec.bounds`, so that each pod's hostname and every label stay within 63 characters.
"""

from __future__ import annotations

import hashlib
from typing import Final

from dlion_api.names import GROUP, JobKey

NAME_LABEL: Final = "app.kubernetes.io/name"
NAME: Final = "dlion"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
WORKER: Final = "worker"
KEEPER: Final = "keeper"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "dlion-operator"
"""Also the field manager of server-side apply."""

JOB_LABEL: Final = f"{GROUP}/job-name"
RUN_LABEL: Final = f"{GROUP}/run-id"
SITE_LABEL: Final = f"{GROUP}/site"
GROUP_LABEL: Final = f"{GROUP}/group"
INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
"""Written by Kubernetes on every pod of an Indexed Job: the worker's index in its group."""

SPEC_HASH_ANNOTATION: Final = f"{GROUP}/spec-hash"
MANIFEST_ANNOTATION: Final = f"{GROUP}/manifest-digest"
"""Of the manifest that a Job was made from (`dlion_operator.corrections`)."""
WORKERS_ANNOTATION: Final = f"{GROUP}/workers"
"""How many workers a Job was made with: ranks stand for a whole run, whatever is scaled."""
ALL_WORKERS_ANNOTATION: Final = f"{GROUP}/workers-of-all-sites"
"""The same of all groups of all sites, as JSON, where ranks are counted and follow from it."""
AUTHORITIES_ANNOTATION: Final = f"{GROUP}/authorities"
"""Of a run's Jobs, where its job names an authority: by which the workers of each site are known,
as JSON. Public certificates, never a key."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Of the DLionJob; passed on to its Jobs, which Kueue then starts."""

TRAINER_CONTAINER: Final = "trainer"
SIDECAR_CONTAINER: Final = "sidecar"
KEEPER_CONTAINER: Final = "keeper"
HOLDING_BACK_SIGTERM: Final = ("env", "--block-signal=TERM")
"""Before a container's command (GNU coreutils): a process 1 never gets a signal that it does not
handle yet, unless the signal is blocked; it unblocks this one when it handles it."""

EXCHANGE: Final = "exchange"
MEASURING: Final = "measuring"
"""Names of a worker's ports in its Services."""
EXCHANGE_PORT: Final = 7440
MEASURING_PORT: Final = 7441
KEEPER_PORT: Final = 7442
COORDINATOR_PORT: Final = 7443
FEDERATION_PORT: Final = 8446
"""Where the operators of other sites connect."""
METRICS_PORT: Final = 9440
"""Of sidecar and operator."""
HEALTH_PORT: Final = 9441
"""Of the operator: /livez and /readyz."""

TOKEN_AUDIENCE: Final = f"coordinator.{GROUP}"
"""Of the service account token that a pod proves itself with."""

POD_CONFIG_KEY: Final = "pod.json"
AUTHORITY_KEY: Final = "ca.pem"
"""Keys of the run's ConfigMap."""

BUNDLE_KEY: Final = "ca.crt"
"""Key of the ConfigMap in which an operator shows its authority's certificates: in its own
namespace, of the same name as the authority's Secret, where nobody finds the key as well."""

CONFIG_DIR: Final = "/etc/dlion"
"""The run's ConfigMap, in every container."""
PROGRAM_DIR: Final = "/etc/dlion-program"
"""The ConfigMap of `trainer.program.configMap`, in the trainer and the keeper."""
TOKEN_DIR: Final = "/var/run/secrets/dlion"  # noqa: S105 - a path
TOKEN_FILE: Final = "token"  # noqa: S105 - a file's name
SHARED_DIR: Final = "/run/dlion"
"""An emptyDir that trainer and sidecar share: the sidecar's socket, both configurations."""
STATE_DIR: Final = "/var/lib/dlion"
"""An emptyDir in a worker: checkpoint, results, data. In the keeper the site's claim."""
DATA_DIR: Final = "/data"
"""Relative paths of data sets are taken from here; a pod template mounts it."""

GROUP_VARIABLE: Final = "DLION_GROUP"
INDEX_VARIABLE: Final = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes in every container of an Indexed Job."""
POD_IP_VARIABLE: Final = "DLION_POD_IP"


def run_hash(job: JobKey) -> str:
    """Six hexadecimal digits for the job's name and run, the end of its objects' names.

    The job's name is in it, so that group `b-c` of job `a` and group `c` of job `a-b` differ.
    """
    return hashlib.sha256(f"{job.name}#{job.run_id}".encode()).hexdigest()[:6]


def run_name(job: JobKey) -> str:
    """The run's headless Service and ConfigMap.

    >>> run_name(JobKey("default", "cifar10", "1"))
    'cifar10-77a4cb'
    """
    return f"{job.name}-{run_hash(job)}"


def group_job_name(job: JobKey, group: str) -> str:
    """The Indexed Job of one group of this site; its pods are called `<this>-<index>-<random>`."""
    return f"{job.name}-{group}-{run_hash(job)}"


def worker_service_name(job: JobKey, group: str, index: int) -> str:
    """The Service by which other sites reach one worker, where it is exposed."""
    return f"{group_job_name(job, group)}-{index}"


def keeper_name(job: JobKey) -> str:
    """The keeper's Deployment and Service."""
    return f"{run_name(job)}-keeper"


def keeper_claim_name(job: JobKey) -> str:
    """The keeper's claim, where the operator makes one; it outlives the run, not the job."""
    return f"{job.name}-keeper"


def authority_name(job: JobKey) -> str:
    """The Certificate of the authority that cert-manager makes for a job, and its Secret; for all
    of its runs."""
    return f"{job.name}-authority"


def run_labels(job: JobKey, site: str) -> dict[str, str]:
    """Labels of everything that belongs to that run at that site."""
    return {
        NAME_LABEL: NAME,
        MANAGED_BY_LABEL: MANAGER,
        JOB_LABEL: job.name,
        RUN_LABEL: job.run_id,
        SITE_LABEL: site,
    }

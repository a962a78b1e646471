"""Names, labels and mount paths of a job's objects in a cluster.

Used by the operator, the command line and the pods. `dlion_api.bounds` limits lengths so that
every pod's hostname and every label stay within 63 characters.
"""

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
"""Value of the managed-by label; also the field manager of server-side apply."""

JOB_LABEL: Final = f"{GROUP}/job-name"
RUN_LABEL: Final = f"{GROUP}/run-id"
SITE_LABEL: Final = f"{GROUP}/site"
GROUP_LABEL: Final = f"{GROUP}/group"
INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
"""Written by Kubernetes on every pod of an Indexed Job: the worker's index in its group."""

SPEC_HASH_ANNOTATION: Final = f"{GROUP}/spec-hash"
MANIFEST_ANNOTATION: Final = f"{GROUP}/manifest-digest"
"""Digest of the manifest that a Job was made from."""
WORKERS_ANNOTATION: Final = f"{GROUP}/workers"
"""Number of workers that a Job was created with: scaling must not change a run's ranks."""
ALL_WORKERS_ANNOTATION: Final = f"{GROUP}/workers-of-all-sites"
"""The same for all groups of all sites, as JSON, if ranks are counted."""
AUTHORITIES_ANNOTATION: Final = f"{GROUP}/authorities"
"""On a run's Jobs, if its job names authorities: each site's CA bundle, as JSON; no keys."""
REVOKED_ANNOTATION: Final = f"{GROUP}/revoked"
"""On a DLionJob: revoked workers and sites (`dlion_api.protocol.revocation`)."""
ATTEMPT_ANNOTATION: Final = f"{GROUP}/attempt"
"""Which attempt at its run a Job is of; absent: the first."""
RUNTIME_ANNOTATION: Final = f"{GROUP}/runtime"
"""On a run's Jobs, if they were made with a DLionRuntime: its name and spec, as JSON."""
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""On a DLionJob: its run starts at this site once Kueue has admitted its Workload."""
QUEUE_PRIORITY_LABEL: Final = "kueue.x-k8s.io/priority-class"
"""On a DLionJob: the WorkloadPriorityClass of its Workload."""
QUEUE_OWNER_LABEL: Final = "kueue.x-k8s.io/job-uid"
"""On a Workload: UID of its DLionJob."""
QUEUE_PREBUILT_LABEL: Final = "kueue.x-k8s.io/prebuilt-workload-name"
"""On the copy of a DLionJob that MultiKueue has made in a worker cluster: its Workload there."""
MULTIKUEUE: Final = "kueue.x-k8s.io/multikueue"
"""`spec.managedBy` of a DLionJob that MultiKueue copies to a worker cluster."""
PLACEMENT_ANNOTATION: Final = f"{GROUP}/queue-placement"
"""On Jobs and the keeper's Deployment: what Kueue's admission has added to the pods, as JSON."""
WORKLOAD_ANNOTATION: Final = f"{GROUP}/workload-digest"
"""On a Workload: digest of its spec."""

TRAINER_CONTAINER: Final = "trainer"
SIDECAR_CONTAINER: Final = "sidecar"
KEEPER_CONTAINER: Final = "keeper"
DATASET_INITIALIZER: Final = "dataset-initializer"
MODEL_INITIALIZER: Final = "model-initializer"
"""Init containers that download `trainer.initializer.dataset` and `.model`."""
BLOCK_SIGTERM_COMMAND: Final = ("env", "--block-signal=TERM")
"""Prefix of a container's command (GNU coreutils). The kernel drops a signal to PID 1 without a
handler, unless it is blocked; the process unblocks SIGTERM once it has a handler."""

EXCHANGE: Final = "exchange"
MEASURING: Final = "measuring"
"""Port names of a worker's Services."""
EXCHANGE_PORT: Final = 7440
MEASURING_PORT: Final = 7441
KEEPER_PORT: Final = 7442
COORDINATOR_PORT: Final = 7443
FEDERATION_PORT: Final = 8446
"""Where the operators of other sites connect."""
METRICS_PORT: Final = 9440
"""Metrics port of sidecar and operator."""
HEALTH_PORT: Final = 9441
"""The operator's /livez and /readyz."""

TOKEN_AUDIENCE: Final = f"coordinator.{GROUP}"
"""Audience of pods' service account tokens."""

POD_CONFIG_KEY: Final = "pod.json"
AUTHORITY_KEY: Final = "ca.pem"
"""Keys of the run's ConfigMap."""

BUNDLE_KEY: Final = "ca.crt"
"""Key of the ConfigMap with the certificates of an operator's authority. It has the name and
namespace of the authority's Secret, but no private key."""

CONFIG_DIR: Final = "/etc/dlion"
"""Mount of the run's ConfigMap, in every container."""
PROGRAM_DIR: Final = "/etc/dlion-program"
"""Mount of `trainer.program.configMap`, in trainer and keeper."""
TOKEN_DIR: Final = "/var/run/secrets/dlion"  # noqa: S105 - a path
TOKEN_FILE: Final = "token"  # noqa: S105 - a file's name
SHARED_DIR: Final = "/run/dlion"
"""An emptyDir that trainer and sidecar share: the sidecar's socket and both configurations."""
STATE_DIR: Final = "/var/lib/dlion"
"""The state folder: in a worker an emptyDir with checkpoint, results and data; in the keeper the
site's claim."""
DATA_DIR: Final = "/data"
"""Base of relative data set paths; a pod template mounts it."""

DOWNLOADS_DIR: Final = "/var/lib/dlion-downloads"
"""Where a pod's initializers put what they download. A podTemplate may replace its volume."""
DOWNLOADS_VOLUME: Final = "downloads"

DOWNLOADS_VARIABLE: Final = "DLION_DOWNLOADS"
"""Folder of downloads, if it is not in the user's cache."""
DOWNLOAD_BYTES_VARIABLE: Final = "DLION_DOWNLOAD_BYTES"
"""The most bytes that all downloads of a pod may take, packed and unpacked together. Missing: their
volume has no limit."""
DOWNLOAD_CREDENTIALS: Final = {
    "token": "DLION_DOWNLOAD_TOKEN",
    "username": "DLION_DOWNLOAD_USERNAME",
    "password": "DLION_DOWNLOAD_PASSWORD",
    "AWS_ACCESS_KEY_ID": "DLION_DOWNLOAD_AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY": "DLION_DOWNLOAD_AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN": "DLION_DOWNLOAD_AWS_SESSION_TOKEN",
    "AWS_REGION": "DLION_DOWNLOAD_AWS_REGION",
    "AWS_ENDPOINT_URL": "DLION_DOWNLOAD_AWS_ENDPOINT_URL",
}
"""Keys of the Secret of a download, with the variables that hold them."""

GROUP_VARIABLE: Final = "DLION_GROUP"
INDEX_VARIABLE: Final = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes in every container of an Indexed Job."""
POD_IP_VARIABLE: Final = "DLION_POD_IP"


def run_hash(job: JobKey) -> str:
    """Return the six hexadecimal digits that end the names of a run's objects.

    The hash includes the job's name, so that group `b-c` of job `a` and group `c` of job `a-b`
    differ.
    """
    return hashlib.sha256(f"{job.name}#{job.run_id}".encode()).hexdigest()[:6]


def run_name(job: JobKey) -> str:
    """Return the name of the run's headless Service and ConfigMap.

    >>> run_name(JobKey("default", "cifar10", "1"))
    'cifar10-77a4cb'
    """
    return f"{job.name}-{run_hash(job)}"


def dispatched_workload_name(job_name: str) -> str:
    """Return the name of the Workload by which MultiKueue dispatches a job, for all of its runs.

    A run that follows another gets its name only after Kueue has removed that run's copy.
    """
    return f"{job_name}-dispatch"


def group_job_name(job: JobKey, group: str) -> str:
    """Return the name of a group's Indexed Job; its pods are `<this>-<index>-<random>`."""
    return f"{job.name}-{group}-{run_hash(job)}"


def worker_service_name(job: JobKey, group: str, index: int) -> str:
    """Return the name of the Service that exposes one worker to other sites."""
    return f"{group_job_name(job, group)}-{index}"


def keeper_name(job: JobKey) -> str:
    """Return the name of the keeper's Deployment and Service."""
    return f"{run_name(job)}-keeper"


def keeper_claim_name(job: JobKey) -> str:
    """Return the name of the keeper's volume claim, which outlives the run but not the job."""
    return f"{job.name}-keeper"


def authority_name(job: JobKey) -> str:
    """Return the name of a job's cert-manager Certificate and Secret, for all of its runs."""
    return f"{job.name}-authority"


def run_labels(job: JobKey, site: str) -> dict[str, str]:
    """Return the labels of all objects of that run at that site."""
    return {
        NAME_LABEL: NAME,
        MANAGED_BY_LABEL: MANAGER,
        JOB_LABEL: job.name,
        RUN_LABEL: job.run_id,
        SITE_LABEL: site,
    }


IMAGE_REASONS: Final = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
        "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed",
    }
)  # fmt: skip
"""The kubelet's reasons for which a container waits that lacks its image."""
CONTAINER_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError",
     "PostStartHookError"}
)  # fmt: skip
"""The same of a container that cannot be started."""

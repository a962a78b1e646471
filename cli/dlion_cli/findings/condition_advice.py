"""What to do about each reason of a condition, as in docs/conditions.md."""

from collections.abc import Mapping
from typing import Final

from dlion_api.cluster_names import COMPONENT_LABEL, JOB_LABEL, WORKER
from dlion_api.status_names import Reason

NO_PROBLEM: Final = frozenset(
    {Reason.TRAINING, Reason.COMPLETED, Reason.NOT_SELECTED, Reason.SUSPENDED, Reason.QUEUED}
)
"""Reasons that are not problems by themselves; some have a note."""
EXPLAINED_BY_PODS: Final = frozenset(
    {
        Reason.WORKERS_STARTING,
        Reason.IMAGE_UNAVAILABLE,
        Reason.UNSCHEDULABLE,
        Reason.PODS_REFUSED,
        Reason.CONTAINER_BROKEN,
    }
)
"""Reasons whose cause is a problem of a pod or of its creation."""
NEW_RUN: Final = "correct it, then start another run: dlion submit FILE --set runId=…"
_INITIALIZER_LOGS: Final = (
    f"kubectl logs -l {JOB_LABEL}={{name}},{COMPONENT_LABEL}={WORKER} -c {{initializer}}"
)

ADVICE: Final[Mapping[Reason, tuple[str, str]]] = {
    Reason.PENDING: (
        "Wait; if it lasts, check the operator",
        "kubectl get pods -A -l app.kubernetes.io/name=dlion",
    ),
    Reason.WORKERS_STARTING: ("Wait for the pods", "dlion watch {name}"),
    Reason.INITIALIZING: (
        "Wait for the downloads; the message has the progress",
        _INITIALIZER_LOGS,
    ),
    Reason.QUEUED: ("Wait, or raise the queue's quota", "kubectl get workloads"),
    Reason.QUEUE_INACTIVE: (
        "Set spec.active of the named Workload to true, or suspend and resume the job",
        "kubectl describe workloads",
    ),
    Reason.QUEUE_UNUSABLE: (
        "Correct what the message names; it is tried again by itself",
        "kubectl get workloads,localqueues",
    ),
    Reason.RUNTIME_UNAVAILABLE: (
        "Have the site's administrators create the DLionRuntime, or name another (spec.runtime)",
        "kubectl get dlionruntimes -A",
    ),
    Reason.RUNTIME_LIMIT_EXCEEDED: (
        "Ask less, or name another DLionRuntime (spec.runtime)",
        "kubectl get dlionruntimes -A -o yaml",
    ),
    Reason.WAITING_FOR_PEERS: (
        "Apply the manifest at the sites that lack it, and check the links",
        "dlion preflight FILE --contexts A,B",
    ),
    Reason.BELOW_QUORUM: (
        "Bring more sites in, or lower minSites with a new runId",
        "dlion preflight FILE --contexts A,B",
    ),
    Reason.TRAINING: ("Nothing", ""),
    Reason.PEERS_LOST: ("They return by themselves; see their pods and events", ""),
    Reason.SPEC_DIFFERS: ("Apply the same manifest at every site", "dlion submit FILE"),
    Reason.SUSPENDED: ("Resume it when the workers should train", "dlion resume {name}"),
    Reason.NOT_SELECTED: ("Nothing, or name this site in spec.sites", ""),
    Reason.COMPLETED: ("Fetch the model", "dlion fetch {name}"),
    Reason.INVALID_SPEC: ("Correct the manifest", "dlion validate FILE"),
    Reason.DEADLINE_EXCEEDED: (
        "Fetch the model as it is, or raise activeDeadlineSeconds and change runId",
        "dlion fetch {name}",
    ),
    Reason.RESTARTS_EXCEEDED: (f"See the log, {NEW_RUN}", "dlion logs {name}"),
    Reason.PROGRAM_FAILED: (
        f"The program raised an error: see its traceback, {NEW_RUN}",
        "dlion logs {name}",
    ),
    Reason.INITIALIZER_FAILED: (
        f"A download failed: see the message (trainer.initializer), {NEW_RUN}",
        _INITIALIZER_LOGS,
    ),
    Reason.FAILED_BY_RULE: (
        f"A rule of failureRules failed the run: see the named end, {NEW_RUN}",
        "dlion logs {name}",
    ),
    Reason.RETRYING: ("Wait; the failed pods' logs stay until then", "dlion logs {name}"),
    Reason.WORKERS_FAILED: (f"See the exit code and the log, {NEW_RUN}", "dlion logs {name}"),
    Reason.FORBIDDEN: (
        "Grant the operator the permission, or raise the quota; it retries by itself",
        "kubectl describe resourcequota",
    ),
    Reason.TEMPLATE_NOT_ALLOWED: (
        "Remove from podTemplate what the message names, or have the site's values allow it",
        "dlion render FILE --values VALUES",
    ),
    Reason.NAMESPACE_EXCLUDED: (
        "Create the job in another namespace, or have the site's values allow this one",
        "",
    ),
    Reason.POLICY_DENIED: ("Change the admission policy, or the manifest", ""),
    Reason.IMAGE_UNAVAILABLE: ("Correct the image's name or its pull Secret", ""),
    Reason.UNSCHEDULABLE: ("Free capacity, or lower the group's resources", "kubectl get nodes"),
    Reason.PODS_REFUSED: (
        "See why Kubernetes creates no pod",
        "kubectl describe jobs -l dlion.dev/job-name={name}",
    ),
    Reason.CONTAINER_BROKEN: (
        "Create the missing Secret, ConfigMap or claim; else see the log",
        "dlion logs {name}",
    ),
    Reason.NOT_JOINING: (
        "See the log; check the network from the pods to the operator's Service",
        "dlion logs {name}",
    ),
    Reason.NOT_LINKED: (
        "Check NetworkPolicies, firewalls and addresses between the workers' ports",
        "dlion events {name} --types Warning",
    ),
    Reason.NOT_EXPOSED: ("Correct what the message names (network.exposure)", "kubectl get svc"),
    Reason.WORKERS_REVOKED: (
        "Replace the machine or correct its data, then lift the revocation",
        "dlion trust restore {name} WORKER",
    ),
    Reason.NO_AUTHORITY: ("Create the named Secret or Issuer (tls)", "kubectl get secrets"),
    Reason.UPKEEP_FAILING: ("Correct what the message names; it is retried every minute", ""),
    Reason.KEEPER_UNAVAILABLE: (
        "Checkpoints and the model wait for it: see its pod",
        "dlion logs {name} -c keeper",
    ),
    Reason.MODEL_LOST: ("Fetch the model from another site", "dlion fetch {name} --context OTHER"),
    Reason.ENDED_EARLY: ("Fetch what was saved; continue with a new runId", "dlion fetch {name}"),
    Reason.PARTIAL: (
        "See why the named workers failed; the model has the others",
        "dlion fetch {name}",
    ),
}

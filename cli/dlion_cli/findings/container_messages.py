"""What to do about messages of scheduler, kubelet, container runtime and admission, by pattern.

The patterns are those of Kubernetes 1.28 to 1.34 and containerd. An unknown message gets a general
advice, so that a new release loses detail only.
"""

import re
from dataclasses import dataclass
from typing import Final

from dlion_api.endings import KILLED_HINT, SIGKILL_EXIT_CODE
from dlion_api.exit_codes import ExitCode
from dlion_cli.findings.job_problem import OBJECT_NAME


@dataclass(frozen=True)
class MessageAdvice:
    """What a message means: a reason in one word, what to do, and a command that helps."""

    reason: str
    advice: str
    command: str = ""
    """The command without the option for the namespace."""


@dataclass(frozen=True)
class _MessagePattern:
    """A pattern, and what to do where it is found; `{0}` is its first group."""

    pattern: str
    reason: str
    advice: str
    command: str = ""

    def search(self, message: str) -> MessageAdvice | None:
        found = re.search(self.pattern, message, re.IGNORECASE)
        if found is None:
            return None
        groups = [str(group or "")[:200] for group in found.groups()]
        advice = self.advice.format(*groups)
        # A group is any word of a message, and events may have any message.
        names = [group if OBJECT_NAME.fullmatch(group) else "" for group in groups]
        named = [place for place in range(len(groups)) if f"{{{place}}}" in self.command]
        is_whole = all(names[place] for place in named)
        return MessageAdvice(self.reason, advice, self.command.format(*names) if is_whole else "")


_NOT_READY: Final = (
    r"node\.(?:kubernetes\.io/(?:not-ready|unreachable|network-unavailable)"
    r"|cloudprovider\.kubernetes\.io/uninitialized)"
)
_PRESSURE: Final = r"node\.kubernetes\.io/[a-z]+-pressure"
"""Taints that Kubernetes sets for a node's state."""
_UNSCHEDULABLE: Final = (
    _MessagePattern(
        rf"untolerated taint(?:\(s\))? ?\{{?({_NOT_READY}[^}}]*)",
        "NodeNotReady", "Bring the nodes back that are not ready ({0})", "kubectl get nodes",
    ),
    _MessagePattern(
        rf"untolerated taint(?:\(s\))? ?\{{?({_PRESSURE})",
        "NodePressure", "Free memory or disk of the node: it has the taint {0}",
        "kubectl describe nodes",
    ),
    _MessagePattern(
        rf"untolerated taint(?!(?:\(s\))? ?\{{?(?:{_NOT_READY}|{_PRESSURE}))"
        r"(?:\(s\))?(?: ?\{([^}]*)\})?",
        "UntoleratedTaint",
        "Add a toleration to podTemplate of the job, or of the group if it has its own list; "
        "or remove the taint {0}",
        "kubectl get nodes -o custom-columns=NAME:.metadata.name,TAINTS:.spec.taints",
    ),
    _MessagePattern(
        r"Insufficient ((?!cpu|memory|ephemeral-storage|pods)[\w.-]+/[\w-]+|gpu)",
        "InsufficientDevices",
        "No node has enough {0} free: check its device plugin, free some, or lower the group's "
        "resources",
        "kubectl describe nodes",
    ),
    _MessagePattern(
        r"Insufficient (cpu|memory|ephemeral-storage)",
        "InsufficientResources",
        "Lower {0} in the group's resources.requests, free some on the nodes, or add a node",
        "kubectl describe nodes",
    ),
    _MessagePattern(
        r"didn't match Pod's node (?:affinity|selector)",
        "NodeSelectorMismatch", "Correct the group's nodeSelector, or label a node",
        "kubectl get nodes --show-labels",
    ),
    _MessagePattern(
        r'persistentvolumeclaim "([^"]+)" (?:not found|bound to non-existent)',
        "ClaimMissing", "Create the PersistentVolumeClaim {0}", "kubectl get pvc",
    ),
    _MessagePattern(
        r"unbound immediate PersistentVolumeClaims",
        "ClaimPending",
        "Its PersistentVolumeClaim is not bound: check its StorageClass and provisioner",
        "kubectl describe pvc",
    ),
    _MessagePattern(
        r"volume node affinity conflict",
        "VolumeElsewhere", "Its volume is on another node: free capacity there",
        "kubectl describe pv",
    ),
    _MessagePattern(
        r"Too many pods|Insufficient pods",
        "TooManyPods", "The nodes run as many pods as they may: add a node", "kubectl get nodes",
    ),
    _MessagePattern(
        r"node\(s\) were unschedulable",
        "NodesCordoned", "Allow pods on the nodes again: kubectl uncordon NODE",
        "kubectl get nodes",
    ),
    _MessagePattern(
        r"no nodes available|0/0 nodes", "NoNodes", "Add a node to the cluster",
        "kubectl get nodes",
    ),
)  # fmt: skip
_PREEMPTION: Final = re.compile(
    r"[.,;]? *(?:no new claims to deallocate, *)?preemption: .*", re.DOTALL
)

_IMAGE: Final = (
    _MessagePattern(
        r"InvalidImageName|couldn't parse image|invalid reference format",
        "InvalidImageName", "Correct the name of the image",
    ),
    _MessagePattern(
        r"ErrImageNeverPull|never pull|pull policy of Never",
        "ImageNotOnNode", "Load the image onto the node, or allow pulls (imagePullPolicy)",
    ),
    _MessagePattern(
        r"unauthorized|authorization failed|authentication required|access denied|denied:"
        r"|\b40[13] (?:Unauthorized|Forbidden)|no basic auth",
        "ImageAccessDenied",
        "The registry refuses access: check the image's name, create a pull Secret and name it in "
        "spec.podTemplate (imagePullSecrets)",
        "kubectl create secret docker-registry NAME --docker-server=… --docker-username=… "
        "--docker-password=…",
    ),
    _MessagePattern(
        r"not found|manifest unknown|repository does not exist",
        "ImageNotFound", "The registry has no such image: correct its name and tag, or push it",
    ),
    _MessagePattern(
        r"no match for platform|exec format",
        "ImagePlatform", "Build the image for this node's architecture, too",
    ),
    _MessagePattern(
        r"toomanyrequests|rate limit",
        "RegistryLimit", "The registry limits pulls: wait, or pull with an account",
    ),
    _MessagePattern(
        r"no such host|i/o timeout|connection refused|x509|TLS handshake|deadline exceeded"
        r"|no route to host|network is unreachable|server misbehaving|\bEOF\b",
        "RegistryUnreachable",
        "The node cannot reach the registry: check its name, DNS, proxy and certificates there",
    ),
    _MessagePattern(
        r"no space left", "NodeDiskFull", "Free disk space on the node", "kubectl describe nodes"
    ),
)  # fmt: skip

_CONTAINER: Final = (
    _MessagePattern(
        r'configmaps? "([^"]+)" not found',
        "ConfigMapMissing", "Create the ConfigMap {0} in this namespace", "kubectl get configmaps",
    ),
    _MessagePattern(
        r'secrets? "([^"]+)" not found',
        "SecretMissing", "Create the Secret {0} in this namespace", "kubectl get secrets",
    ),
    _MessagePattern(
        r"couldn't find key (\S+) in (ConfigMap|Secret) (?:[^/\s]+/)?([\w.-]+)",
        "KeyMissing", "Add the key {0} to the {1} {2}", "kubectl describe {1} {2}",
    ),
    _MessagePattern(
        r"references non-existent (secret|config) key: (\S+)",
        "KeyMissing", "Add the key {1} to the object that the volume names",
    ),
    _MessagePattern(
        r"runAsNonRoot and image (?:will run as root|has non-numeric user)",
        "RunsAsRoot", "Set runAsUser in spec.podTemplate, or a numeric USER in the image",
    ),
    _MessagePattern(
        r"exec: \"([^\"]+)\"|executable file not found",
        "CommandMissing", "The image lacks the command {0}: build it on DLion's (docs/images.md)",
    ),
    _MessagePattern(
        r"(?:timed out|failed) waiting for .*volume|AttachVolume|volume .* not found",
        "VolumeUnavailable", "Check the volume and its driver", "kubectl get pvc,pv",
    ),
    _MessagePattern(
        r"cni|network plugin|failed to setup network",
        "PodNetwork", "Check the network plugin (CNI) of the node", "kubectl get nodes",
    ),
    _MessagePattern(
        r"no space left", "NodeDiskFull", "Free disk space on the node", "kubectl describe nodes"
    ),
)  # fmt: skip

_CREATION: Final = (
    _MessagePattern(
        r"exceeded quota: ([\w.-]+)",
        "QuotaExceeded", "Raise the ResourceQuota {0}, or lower workers or resources of the group",
        "kubectl describe resourcequota {0}",
    ),
    _MessagePattern(
        r"failed quota: ([\w.-]+): must specify ([^;]+)",
        "QuotaNeedsResources", "The ResourceQuota {0} needs resources for every container: {1}",
        "kubectl describe resourcequota {0}",
    ),
    _MessagePattern(
        r'violates PodSecurity "([^"]+)"',
        "PodSecurityViolated",
        "Remove from spec.podTemplate what the message names, or run the job in a namespace that "
        "allows it (pod-security.kubernetes.io/enforce)",
    ),
    _MessagePattern(
        r'serviceaccount "([\w.-]+)" not found',
        "ServiceAccountMissing", "Create the ServiceAccount {0}",
        "kubectl create serviceaccount {0}",
    ),
    _MessagePattern(
        r'admission webhook "([^"]+)" denied|(ValidatingAdmissionPolicy[^:]*)',
        "AdmissionDenied", "Change what the policy refuses, or the policy {0}{1}",
    ),
    _MessagePattern(
        r"(?:maximum|minimum) \S+ usage per|must be less than or equal to \S+ limit",
        "LimitRange", "Change the group's resources to what the LimitRange allows",
        "kubectl describe limitrange",
    ),
    _MessagePattern(
        r"priorityclass[^\"]*\"?([\w.-]+)?\"? (?:was )?not found|no PriorityClass with name (\S+)",
        "PriorityClassMissing", "Create the PriorityClass {0}{1}",
    ),
)  # fmt: skip

_EXITS: Final = {
    ExitCode.SPEC: "Correct the manifest as the log explains",
    ExitCode.DATA: "Check the path of the data that the log names",
    ExitCode.PROGRAM: "The program raised an error or broke its protocol: see the traceback",
    ExitCode.UNAVAILABLE: "A peer or the coordinator does not answer: see the log",
    ExitCode.MODEL_LOST: "The keeper did not receive the model: see the keeper's log",
    ExitCode.STORAGE: "A disk is full or not writable: raise ephemeral-storage in the resources",
    ExitCode.DIVERGED: "Loss or weights are no longer finite: lower the learning rate",
    ExitCode.RESTARTS: "The trainer ended more often than maxRestarts allows: see the log",
    ExitCode.DENIED: "The cluster refuses it: see the log",
}  # fmt: skip
_SHELL_EXITS: Final = {
    126: "The image's command cannot be run: build the image on DLion's (docs/images.md)",
    127: "The image lacks the command: build it on DLion's (docs/images.md)",
    SIGKILL_EXIT_CODE: f"It was killed{KILLED_HINT}",
    139: "It crashed (SIGSEGV): check native libraries and the processor's features",
    143: "It was asked to end (SIGTERM)",
}


def unschedulable(message: str) -> tuple[str, MessageAdvice]:
    """The scheduler's message without its part on preemption, and what to do."""
    kept = _PREEMPTION.sub("", message)
    found = [advice for one in _UNSCHEDULABLE if (advice := one.search(kept))]
    if not found:
        return kept, MessageAdvice(
            "Unschedulable", "Free capacity, or lower the group's resources", "kubectl get nodes"
        )
    reason = found[0].reason if len(found) == 1 else "Unschedulable"
    return kept, MessageAdvice(
        reason, "; or: ".join(advice.advice for advice in found), found[0].command
    )


def image_problem(reason: str, message: str) -> MessageAdvice:
    """What to do about an image that a node does not get."""
    return _first(_IMAGE, f"{reason}: {message}") or MessageAdvice(
        reason, "Check the image's name, and that the node can get it"
    )


def container_problem(reason: str, message: str) -> MessageAdvice | None:
    """What to do about a container or volume that cannot be made; None for another message."""
    return _first(_CONTAINER, f"{reason}: {message}")


def creation_problem(message: str) -> MessageAdvice:
    """What to do where Kubernetes refuses to create a pod."""
    return _first(_CREATION, message) or MessageAdvice(
        "PodsRefused", "Correct what the message names; Kubernetes retries by itself"
    )


def exit_advice(code: int) -> str:
    """What an exit code of a container means, and what to do."""
    advice = _SHELL_EXITS.get(code)
    if advice is None and code in set(ExitCode):
        advice = _EXITS.get(ExitCode(code))
    return advice or "See its log"


def _first(patterns: tuple[_MessagePattern, ...], message: str) -> MessageAdvice | None:
    return next((advice for one in patterns if (advice := one.search(message))), None)

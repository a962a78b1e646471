"""Workers' pods that each violate one rule of pod security `restricted`, and the rule's name.

An API server without enforcement accepts each of them, except those in UNHEARD_OF.
"""

from __future__ import annotations

import copy
from typing import Any

from dlion_api.spec import load_job
from dlion_operator.children.worker_jobs import worker_job
from dlion_operator.plan.runs import groups_of
from operator_world import SETTINGS, dlion_job

END = -1
"""In a path: append to the list."""

_TRAINER, _SIDECAR = ("containers", 0), ("initContainers", 0)
_CONTEXT = (*_TRAINER, "securityContext")
Path = tuple[str | int, ...]

FORBIDDEN: dict[str, tuple[Path, Any, str]] = {
    "host network": (("hostNetwork",), True, "hostNetwork"),
    "host processes": (("hostPID",), True, "hostPID"),
    "host path": (
        ("volumes", END),
        {"name": "x", "hostPath": {"path": "/"}},
        "must not be a hostPath",
    ),
    "nfs": (("volumes", END), {"name": "x", "nfs": {"server": "a", "path": "/"}}, "nfs"),
    "root": (("securityContext", "runAsUser"), 0, "runAsUser"),
    "perhaps root": (("securityContext", "runAsNonRoot"), False, "runAsNonRoot"),
    "seccomp": (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "seccompProfile"),
    "sysctls": (
        ("securityContext", "sysctls"),
        [{"name": "kernel.msgmax", "value": "1"}],
        "sysctls",
    ),
    "SELinux": (("securityContext", "seLinuxOptions"), {"user": "root"}, "seLinuxOptions"),
    "privileged": (_CONTEXT, {"privileged": True, "capabilities": {"drop": ["ALL"]}}, "privileged"),
    "escalation": ((*_CONTEXT, "allowPrivilegeEscalation"), True, "Escalation"),
    "capabilities kept": ((*_CONTEXT, "capabilities"), {}, "drop must hold ALL"),
    "capabilities added": (
        (*_CONTEXT, "capabilities", "add"),
        ["NET_ADMIN"],
        "must not hold NET_ADMIN",
    ),
    "proc": ((*_CONTEXT, "procMount"), "Unmasked", "procMount"),
    "host port": ((*_TRAINER, "ports"), [{"containerPort": 1, "hostPort": 80}], "hostPort"),
    "sidecar without a context": (
        (*_SIDECAR, "securityContext"),
        {},
        "initContainers[sidecar]",
    ),
    "liveness of another host": (
        (*_TRAINER, "livenessProbe"),
        {"httpGet": {"host": "10.0.0.1", "port": 1}},
        "containers[trainer].livenessProbe.httpGet.host must not be set",
    ),
    "start of another host": (
        (*_TRAINER, "startupProbe"),
        {"tcpSocket": {"host": "127.0.0.1", "port": 1}},
        "startupProbe.tcpSocket.host",
    ),
    "readiness of another host": (
        (*_SIDECAR, "readinessProbe"),
        {"httpGet": {"host": "node", "port": 1}},
        "initContainers[sidecar].readinessProbe.httpGet.host",
    ),
    "hook at another host": (
        (*_TRAINER, "lifecycle"),
        {"preStop": {"httpGet": {"host": "node", "port": 1}}},
        "lifecycle.preStop.httpGet.host",
    ),
    "hook at another host's socket": (
        (*_TRAINER, "lifecycle"),
        {"postStart": {"tcpSocket": {"host": "node", "port": 1}}},
        "lifecycle.postStart.tcpSocket.host",
    ),
    "AppArmor": ((*_CONTEXT, "appArmorProfile"), {"type": "Unconfined"}, "appArmorProfile"),
}

UNHEARD_OF = frozenset({"proc"})
"""Pods that an API server refuses for another reason, before it checks pod security."""


def allowed() -> dict[str, Any]:
    """The spec of a worker's pod as the operator creates it."""
    job = load_job(dlion_job())
    (group,) = groups_of(job, "plant-a")
    made = worker_job(job, group, SETTINGS, {"uid": "u"})
    spec: dict[str, Any] = copy.deepcopy(made["spec"]["template"]["spec"])
    return spec


def forbidden(name: str) -> dict[str, Any]:
    """The same pod with that violation."""
    (*way, last), value, _ = FORBIDDEN[name]
    spec = allowed()
    place: Any = spec
    for step in way:
        place = place[step]
    if last == END:
        place.append(value)
    else:
        place[last] = value
    return spec

"""What in a pod breaks pod security `restricted`.

Proves: the pods that are rendered break nothing; each forbidden thing is named with its path.
Left out: that an API server that enforces `restricted` refuses the same; of these rows none is put
to one (tests/cluster/test_chart.py has it take the operator's own pod).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dlion_api.spec import load_job
from dlion_operator import children
from dlion_operator.pod_security import restricted_violations
from dlion_operator.runs import groups_of
from operator_world import SETTINGS, dlion_job


def pod() -> dict[str, Any]:
    job = load_job(dlion_job())
    (group,) = groups_of(job, "plant-a")
    made = children.worker_job(job, group, SETTINGS, {"uid": "u"})
    spec: dict[str, Any] = copy.deepcopy(made["spec"]["template"]["spec"])
    return spec


def test_a_workers_pod_keeps_to_it() -> None:
    assert restricted_violations(pod()) == ()


def test_a_keepers_pod_keeps_to_it() -> None:
    *_, deployment = children.keeper_objects(load_job(dlion_job()), SETTINGS, {"uid": "u"})
    assert restricted_violations(deployment["spec"]["template"]["spec"]) == ()


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["hostNetwork"], True, "hostNetwork"),
        (["hostPID"], True, "hostPID"),
        (["volumes", 0], {"name": "x", "hostPath": {"path": "/"}}, "volumes[0] must not be a host"),
        (["volumes", 0], {"name": "x", "nfs": {"server": "a"}}, "nfs"),
        (["securityContext", "runAsUser"], 0, "runAsUser"),
        (["securityContext", "runAsNonRoot"], False, "runAsNonRoot"),
        (["securityContext", "seccompProfile"], {"type": "Unconfined"}, "seccompProfile"),
        (["securityContext", "sysctls"], [{"name": "kernel.msgmax", "value": "1"}], "sysctls"),
        (["securityContext", "seLinuxOptions"], {"user": "root"}, "seLinuxOptions"),
        (["containers", 0, "securityContext", "privileged"], True, "privileged"),
        (["containers", 0, "securityContext", "allowPrivilegeEscalation"], True, "Escalation"),
        (["containers", 0, "securityContext", "capabilities"], {}, "drop must hold ALL"),
        (
            ["containers", 0, "securityContext", "capabilities", "add"],
            ["SYS_ADMIN"],
            "must not hold SYS_ADMIN",
        ),
        (["containers", 0, "securityContext", "procMount"], "Unmasked", "procMount"),
        (["containers", 0, "ports"], [{"containerPort": 1, "hostPort": 80}], "hostPort"),
        (["initContainers", 0, "securityContext"], {}, "initContainers[sidecar]"),
        (
            ["containers", 0, "livenessProbe"],
            {"httpGet": {"host": "10.0.0.1", "port": 1}},
            "containers[trainer].livenessProbe.httpGet.host must not be set",
        ),
        (
            ["containers", 0, "startupProbe"],
            {"tcpSocket": {"host": "127.0.0.1", "port": 1}},
            "startupProbe.tcpSocket.host",
        ),
        (
            ["initContainers", 0, "readinessProbe"],
            {"httpGet": {"host": "node", "port": 1}},
            "initContainers[sidecar].readinessProbe.httpGet.host",
        ),
        (
            ["containers", 0, "lifecycle"],
            {"preStop": {"httpGet": {"host": "node", "port": 1}}},
            "lifecycle.preStop.httpGet.host",
        ),
        (
            ["containers", 0, "lifecycle"],
            {"postStart": {"tcpSocket": {"host": "node", "port": 1}}},
            "lifecycle.postStart.tcpSocket.host",
        ),
        (
            ["containers", 0, "securityContext", "appArmorProfile"],
            {"type": "Unconfined"},
            "appArmorProfile",
        ),
    ],
)
def test_what_is_forbidden_is_named(path: list[str | int], value: object, words: str) -> None:
    spec = pod()
    place: Any = spec
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert any(words in each for each in restricted_violations(spec))


def test_probes_of_the_pod_itself_are_no_fault() -> None:
    spec = pod()
    spec["containers"][0] |= {
        "livenessProbe": {"httpGet": {"host": "", "port": 1}},
        "lifecycle": {"preStop": {"httpGet": {"port": 1}}, "postStart": None},
    }
    assert restricted_violations(spec) == ()


@pytest.mark.parametrize(
    "nonsense", [{"containers": 3}, {"volumes": [None]}, {"containers": ["x"]}]
)
def test_nonsense_is_no_crash(nonsense: dict[str, Any]) -> None:
    restricted_violations(nonsense)

"""Test that an API server with pod security `restricted` agrees with the operator.

The present pod of a worker is accepted. Each pod that the operator calls forbidden is refused for
its pod security, and accepted without enforcement, so there is no other reason. The tests use dry
runs. Left out: pods of a Job, which are refused one by one, later.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api.errors import UnavailableError
from fault_proxy import waited
from forbidden_pods import FORBIDDEN, UNHEARD_OF, allowed, forbidden

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

pytestmark = pytest.mark.cluster
ENFORCES = "pod-security.kubernetes.io/enforce"


def refusal(kubectl: Kubectl, spec: dict[str, Any]) -> str:
    """Return why the API server refuses a pod of that spec; empty if it accepts it."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asked"}, "spec": spec}
    try:
        kubectl.run("create", "--dry-run=server", "-f", "-", text=json.dumps(pod))
    except UnavailableError as error:
        return str(error)
    return ""


def enforce(kubectl: Kubectl, level: str) -> None:
    kubectl.run("label", "--overwrite", "namespace", kubectl.namespace, f"{ENFORCES}={level}")


def test_the_api_server_refuses_exactly_what_the_operator_forbids(kubectl: Kubectl) -> None:
    enforce(kubectl, "restricted")
    kubectl.wait("--for=create", "serviceaccount/default")
    assert waited(lambda: bool(refusal(kubectl, forbidden("host path"))), 30)
    assert refusal(kubectl, allowed()) == ""
    asked = [name for name in FORBIDDEN if name not in UNHEARD_OF]
    refused = {name: refusal(kubectl, forbidden(name)) for name in asked}
    words = 'violates PodSecurity "restricted'
    assert {name: message for name, message in refused.items() if words not in message} == {}
    enforce(kubectl, "privileged")
    assert waited(lambda: not refusal(kubectl, forbidden(asked[0])), 30)
    assert {name: message for name in asked if (message := refusal(kubectl, forbidden(name)))} == {}

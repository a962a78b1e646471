"""What the operator says of pod security `restricted`, an API server that enforces it says as well.

Proves: a worker's pod as it is made is taken; each pod that the operator calls forbidden is refused
for its pod security; each of them is taken where nothing is enforced, so that nothing but that is
the reason. Asked by dry runs. Left out: pods of a Job, which are refused one by one, later.
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
    """What the API server says against a pod of that spec; empty: nothing."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asked"}, "spec": spec}
    try:
        kubectl.run("create", "--dry-run=server", "-f", "-", text=json.dumps(pod))
    except UnavailableError as error:
        return str(error)
    return ""


def enforce(kubectl: Kubectl, level: str) -> None:
    kubectl.run("label", "--overwrite", "namespace", kubectl.namespace, f"{ENFORCES}={level}")


def test_it_refuses_what_the_operator_calls_forbidden_and_nothing_else(kubectl: Kubectl) -> None:
    enforce(kubectl, "restricted")
    kubectl.wait("--for=create", "serviceaccount/default")
    assert waited(lambda: bool(refusal(kubectl, forbidden("host path"))), 30)
    assert refusal(kubectl, allowed()) == ""
    asked = [name for name in FORBIDDEN if name not in UNHEARD_OF]
    refused = {name: refusal(kubectl, forbidden(name)) for name in asked}
    words = 'violates PodSecurity "restricted'
    assert {name: said for name, said in refused.items() if words not in said} == {}
    enforce(kubectl, "privileged")
    assert waited(lambda: not refusal(kubectl, forbidden(asked[0])), 30)
    assert {name: said for name in asked if (said := refusal(kubectl, forbidden(name)))} == {}

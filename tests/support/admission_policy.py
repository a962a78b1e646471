"""An admission policy of an API server that prevents an operator from creating Jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.kubectl import Kubectl

POLICY = "validatingadmissionpolicy"
BINDING = "validatingadmissionpolicybinding"


def label_policy(
    kubectl: Kubectl, operation: str = "CREATE"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Require the label `owner` on every Job of that namespace."""
    name = f"owner-{kubectl.namespace}"
    api = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": ["batch"], "apiVersions": ["v1"], "operations": [operation],
            "resources": ["jobs"]}  # fmt: skip
    expression = "has(object.metadata.labels) && 'owner' in object.metadata.labels"
    chosen = {"matchLabels": {"kubernetes.io/metadata.name": kubectl.namespace}}
    policy = api | {
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule], "namespaceSelector": chosen},
            "validations": [{"expression": expression, "message": "a Job needs an owner"}],
        },
    }
    binding = api | {
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    return policy, binding

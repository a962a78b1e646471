"""The rights that the commands for clusters need (docs/cluster-commands.md), and who has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dlion_api.names import GROUP
from dlion_cli.cluster.client import ClusterClient
from dlion_cli.cluster.cluster_jobs import PLURAL
from dlion_cli.cluster.documents import mapping_of

_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True)
class AccessRight:
    """One verb on one resource of a namespace."""

    verb: str
    resource: str
    """The resource with its subresource: `pods/log`."""
    group: str = ""

    @property
    def text(self) -> str:
        """The right as an argument of `kubectl auth can-i`."""
        return f"{self.verb} {self.resource}{'.' + self.group if self.group else ''}"


def _rights(verbs: str, resource: str, group: str = "") -> tuple[AccessRight, ...]:
    return tuple(AccessRight(verb, resource, group) for verb in verbs.split())


def _jobs(verbs: str) -> tuple[AccessRight, ...]:
    return _rights(verbs, PLURAL, GROUP)


COMMAND_RIGHTS: Final[Mapping[str, tuple[AccessRight, ...]]] = {
    "get, watch": _jobs("get list watch"),
    "submit": (*_jobs("list patch create"), *_rights("patch create", "configmaps")),
    "wait": _jobs("get watch"),
    "top": (*_jobs("get"), *_rights("list", "pods"), *_rights("get", "pods/proxy")),
    "suspend, resume, scale": _jobs("get patch"),
    "delete": _jobs("get delete watch"),
    "logs": (*_jobs("get"), *_rights("list", "pods"), *_rights("get", "pods/log")),
    "fetch": (
        *_jobs("get"),
        *_rights("list", "pods"),
        *_rights("get create", "pods/exec"),
        *_rights("get", "configmaps"),
    ),
}
"""Rights by command; events are optional."""


def is_allowed(cluster: ClusterClient, right: AccessRight, within_s: float) -> bool:
    """Whether the user has this right in the client's namespace. Raises: as `request`."""
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "namespace": cluster.namespace,
        "verb": right.verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
    }
    body: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = cluster.request("POST", _REVIEWS, body=body, timeout_s=within_s).document
    return mapping_of(answer.get("status")).get("allowed") is True

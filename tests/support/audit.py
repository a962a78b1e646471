"""What an account, or operators whatever their account, asked of an API server: by the server's own
audit log, and as rights name it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from chart import CHART
from dlion_api.cluster_names import MANAGER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RIGHTS: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "rights.yaml").read_text())
_CREATED = 201
_FORBIDDEN = 403


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one kind of resource."""

    group: str
    resource: str
    """With its subresource: `pods/status`."""
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


NEVER_ASKED = {
    Right("dlion.dev", "dlionjobs/finalizers", "update"): "an owner reference that blocks deletion"
    " takes it where the admission plugin OwnerReferencesPermissionEnforcement is on, which looks"
    " the right up: no request asks for it",
}


@dataclass(frozen=True)
class Asked:
    """One request of the log."""

    verb: str
    path: str
    code: int
    message: str
    """The server's, where it did not do it."""
    namespace: str
    resource: tuple[str, str] | None
    """Group and resource; None: it is about no resource."""

    @property
    def rights(self) -> set[Right]:
        """What it takes; a patch that makes an object (server-side apply) is a create, too."""
        if self.resource is None:
            return set()
        verbs = {self.verb}
        if self.verb == "patch" and self.code == _CREATED:
            verbs.add("create")
        return {Right(*self.resource, verb) for verb in verbs}


def asked_by(account: str, log: Path) -> list[Asked]:
    """All that a user has asked so far."""
    return [_asked(event) for event in _events(log, account) if _user(event) == account]


def asked_by_operators(log: Path) -> list[Asked]:
    """All that processes have asked so far that say they are an operator; from tests with rights
    over everything, too."""
    return [_asked(event) for event in _events(log, MANAGER) if event.get("userAgent") == MANAGER]


def _events(log: Path, word: str) -> Iterator[dict[str, Any]]:
    """Lines with that word; the last may be cut short where the server was killed."""
    for line in log.read_text().splitlines():
        if word in line and line.endswith("}"):
            yield json.loads(line)


def _user(event: dict[str, Any]) -> str:
    return str(event["user"].get("username", ""))


def refused(asked: list[Asked]) -> list[str]:
    """What was not allowed, in words; that nothing is made in a namespace that goes is no right."""
    return [
        f"{each.verb} {each.path}: {each.message}"
        for each in asked
        if each.code in (401, 403) and "it is being terminated" not in each.message
    ]


def used(asked: list[Asked], *namespaces: str) -> set[Right]:
    """The rights that these requests took in one of the namespaces; "" is that of all."""
    return {right for each in asked if each.namespace in namespaces for right in each.rights}


def listed(*scopes: str) -> set[Right]:
    """What files/rights.yaml grants in these scopes."""
    return {
        Right(group, resource, verb)
        for right in RIGHTS
        if right["scope"] in scopes
        for group in right["apiGroups"]
        for resource in right["resources"]
        for verb in right["verbs"]
    }


def not_granted(asked: list[Asked]) -> list[str]:
    """What was asked for that files/rights.yaml grants in no scope, or that was forbidden."""
    granted = listed(*{right["scope"] for right in RIGHTS})
    beyond = {str(right) for each in asked for right in each.rights - granted}
    return [*sorted(beyond), *refused([each for each in asked if each.code == _FORBIDDEN])]


def _asked(event: dict[str, Any]) -> Asked:
    about = event.get("objectRef")
    resource = None
    if about is not None and "resource" in about:
        below = f"/{about['subresource']}" if about.get("subresource") else ""
        resource = (about.get("apiGroup", ""), about["resource"] + below)
    answer = event.get("responseStatus", {})
    return Asked(
        verb=event["verb"],
        path=event["requestURI"].partition("?")[0],
        code=int(answer.get("code", 0)),
        message=str(answer.get("message", "")),
        namespace=(about or {}).get("namespace", ""),
        resource=resource,
    )

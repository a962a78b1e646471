"""Requests of an account, or of operators under any account, from an API server's audit log.

A right is granted in a scope (files/rights.yaml). An operator with its own account has a known
namespace, and its lists show whether it watches all namespaces or some. Its requests are checked
against the rights for that mode. For an operator that runs with all rights, neither is known. Its
requests are checked against both modes, and against the names that tests give authorities.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from chart import CHART
from dlion_api.cluster_names import MANAGER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RIGHTS: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "rights.yaml").read_text())
ROUTES = ("TLSRoute", "IngressRouteTCP")
MODES = ("cluster", "namespaced")
_NAMES = {
    "AUTHORITY": "dlion-authority", "OPERATOR": "dlion-operator", "SECRET_NAMES": "plant-ca",
    "ADMISSION_POLICY": ".+-tenancy",
}  # fmt: skip
"""Names that the chart grants access to, with the values of this test suite."""
_NAMES_OF_TESTS = {
    **_NAMES,
    "ADMISSION_POLICY": ".*tenancy.*",
    "AUTHORITY": "dlion-authority|authority-.+",
    "SECRET_NAMES": ".*ca",
}
_OF_JOBS = ".+-authority"
"""Pattern of the names of the Secrets that cert-manager fills for jobs."""
_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):[^:]+")
_CREATED = 201
_UNAUTHORIZED, _FORBIDDEN = 401, 403


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one kind of resource."""

    group: str
    resource: str
    """Includes the subresource: `pods/status`."""
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


NEVER_REQUESTED = {
    Right("dlion.dev", "dlionjobs/finalizers", "update"): "an owner reference that blocks deletion"
    " takes it where the admission plugin OwnerReferencesPermissionEnforcement is on, which looks"
    " the right up: no request asks for it",
    Right("kueue.x-k8s.io", "workloads", "patch"): "the copy of a dispatched job takes it: its"
    " operator runs in tests/cluster/test_multikueue.py, in another session",
}


@dataclass(frozen=True)
class AuditedRequest:
    """One request in the log."""

    verb: str
    path: str
    code: int
    message: str
    """The server's error message, if the request failed."""
    namespace: str
    resource: tuple[str, str] | None
    """Group and resource; None if the request concerns no resource."""
    name: str = ""
    """The object's name; empty if the request names none."""
    user: str = ""
    mode: str = ""
    """One of `MODES`, that of the requesting operator; empty if unknown."""
    watched: frozenset[str] = frozenset()
    """The namespaces that the operator watches, in mode namespaced."""

    @property
    def home(self) -> str:
        """The namespace of the requesting account; empty if it has none."""
        account = _ACCOUNT.fullmatch(self.user)
        return account[1] if account else ""

    def __str__(self) -> str:
        where = f"{self.namespace}/{self.name}".strip("/")
        what = "/".join(filter(None, self.resource or ()))
        return f"{self.verb} {what} {where} by {self.user} ({self.mode or 'mode unknown'})"

    def scopes(self) -> set[tuple[str, Right]]:
        """Each right that the request needs, with the scopes of files/rights.yaml that grant it."""
        found = set()
        for right in self.rights:
            scopes = {each["scope"] for each in RIGHTS if self._is_granted(right, each)}
            found |= {(scope, right) for scope in {"operator"} & scopes or scopes}
        return found

    def _is_granted(self, right: Right, rule: dict[str, Any]) -> bool:
        is_of = right.group in rule["apiGroups"] and right.resource in rule["resources"]
        if not is_of or right.verb not in rule["verbs"] or not self._is_named(rule):
            return False
        if rule["scope"] == "operator":
            return self.namespace == (self.home or self.namespace)
        if rule["scope"] in ("KueueClasses", "AdmissionPolicy"):
            return True
        is_in_some = rule["scope"] != "cluster" and self.namespace in self.watched
        return is_in_some if self.mode == "namespaced" else True

    def _is_named(self, rule: dict[str, Any]) -> bool:
        names = _NAMES if self.home else _NAMES_OF_TESTS
        if rule["scope"] == "CertManager" and "secrets" in rule["resources"]:
            return re.fullmatch(_OF_JOBS, self.name) is not None
        wanted = rule.get("resourceNames")
        return not wanted or any(re.fullmatch(names[each], self.name) for each in wanted)

    @property
    def rights(self) -> set[Right]:
        """The rights that the request needs; a server-side apply that creates also needs
        `create`."""
        if self.resource is None:
            return set()
        verbs = {self.verb}
        if self.verb == "patch" and self.code == _CREATED:
            verbs.add("create")
        return {Right(*self.resource, verb) for verb in verbs}


def requests_of(account: str, log: Path) -> list[AuditedRequest]:
    """Return all requests of a user so far."""
    return [_request_of(event) for event in _events(log, account) if _user(event) == account]


def requests_of_operators(log: Path) -> list[AuditedRequest]:
    """Return all requests so far with an operator's user agent, also those of tests with all
    rights."""
    events = _events(log, MANAGER)
    return _in_modes([_request_of(event) for event in events if event.get("userAgent") == MANAGER])


def _in_modes(asked: list[AuditedRequest]) -> list[AuditedRequest]:
    """Add the modes of operators with an account.

    An operator's list requests for jobs show its mode. Requests before its first such list, for
    example when it creates its site's authority, get the mode of that list.
    """
    modes: dict[str, str] = {}
    watched: dict[str, frozenset[str]] = {}
    found = []
    early: dict[str, list[int]] = {}
    for each in asked:
        user = each.user
        if each.home and each.verb == "list" and each.resource == ("dlion.dev", "dlionjobs"):
            modes[user] = "namespaced" if each.namespace else "cluster"
            watched[user] = watched.get(user, frozenset()) | {each.namespace} - {""}
            for number in early.pop(user, ()):
                found[number] = replace(found[number], mode=modes[user], watched=watched[user])
        elif each.home and user not in modes:
            early.setdefault(user, []).append(len(found))
        mode, there = modes.get(user, ""), watched.get(user, frozenset())
        found.append(replace(each, mode=mode, watched=there))
    return found


def _events(log: Path, word: str) -> Iterator[dict[str, Any]]:
    """Lines with that word; the last line may be truncated if the server was killed."""
    for line in log.read_text().splitlines():
        if word in line and line.endswith("}"):
            yield json.loads(line)


def _user(event: dict[str, Any]) -> str:
    return str(event["user"].get("username", ""))


def refused(asked: list[AuditedRequest]) -> list[str]:
    """Return the refused requests as text, except creations in a namespace that is being deleted.

    `helm uninstall` deletes the Deployment and then the rights, without waiting for the pod. An
    operator that stops then may no longer renew or delete its Lease, which expires.
    """
    granted = {(each.verb, each.path) for each in asked if each.code < _UNAUTHORIZED}
    return [
        f"{each.verb} {each.path}: {each.message}"
        for each in asked
        if each.code in (_UNAUTHORIZED, _FORBIDDEN)
        and "it is being terminated" not in each.message
        and not (
            each.resource == ("coordination.k8s.io", "leases")
            and (each.verb == "delete" or (each.verb, each.path) in granted)
        )
    ]


def used(asked: list[AuditedRequest], *namespaces: str) -> set[Right]:
    """The rights that these requests needed in one of the namespaces; "" stands for all
    namespaces."""
    return {right for each in asked if each.namespace in namespaces for right in each.rights}


def listed(*scopes: str) -> set[Right]:
    """The rights that files/rights.yaml grants in these scopes."""
    return {
        Right(group, resource, verb)
        for right in RIGHTS
        if right["scope"] in scopes
        for group in right["apiGroups"]
        for resource in right["resources"]
        for verb in right["verbs"]
    }


def listed_by_scope(*scopes: str) -> set[tuple[str, Right]]:
    """The rights that files/rights.yaml grants in these scopes, each with its scope."""
    return {(scope, right) for scope in scopes for right in listed(scope)}


def not_granted(asked: list[AuditedRequest]) -> list[str]:
    """Return the requests that no scope of files/rights.yaml grants to that operator and name, and
    those that were forbidden."""
    beyond = {str(each) for each in asked if {right for _, right in each.scopes()} != each.rights}
    return [*sorted(beyond), *refused([each for each in asked if each.code != _UNAUTHORIZED])]


def used_in_modes(asked: list[AuditedRequest]) -> set[tuple[str, str, Right]]:
    """Mode, scope and right of all requests, as the processes of a test session report them."""
    return {(each.mode, scope, right) for each in asked for scope, right in each.scopes()}


def granted_but_unused(used: set[tuple[str, str, Right]], *tls: str) -> dict[str, list[str]]:
    """Return, by mode, the granted rights that no operator known to be in that mode used.

    `routes` holds the rights to gateways' routes that no operator used. `tls` adds scopes.
    """
    of_all = ("jobs", "operator", *tls)
    wanted = {mode: listed_by_scope(*of_all) for mode in MODES}
    wanted["cluster"] |= listed_by_scope("cluster")
    wanted["routes"] = listed_by_scope(*ROUTES)
    never = {}
    for mode, rights in wanted.items():
        asked = {(scope, right) for of, scope, right in used if mode in (of, "routes")}
        lacking = {
            (scope, right) for scope, right in rights - asked if right not in NEVER_REQUESTED
        }
        if lacking:
            never[mode] = sorted(f"{scope}: {right}" for scope, right in lacking)
    return never


def _request_of(event: dict[str, Any]) -> AuditedRequest:
    about = event.get("objectRef")
    resource = None
    if about is not None and "resource" in about:
        below = f"/{about['subresource']}" if about.get("subresource") else ""
        resource = (about.get("apiGroup", ""), about["resource"] + below)
    answer = event.get("responseStatus", {})
    return AuditedRequest(
        verb=event["verb"],
        path=event["requestURI"].partition("?")[0],
        code=int(answer.get("code", 0)),
        message=str(answer.get("message", "")),
        namespace=(about or {}).get("namespace", ""),
        resource=resource,
        name=(about or {}).get("name", ""),
        user=_user(event),
    )

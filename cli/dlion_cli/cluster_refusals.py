"""What an API server refuses, in our words: whose fault it is and what to do.

Called by `cluster` with each answer that is no success. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from dlion_api.errors import (
    AbsentError,
    DeniedError,
    DLionError,
    Problem,
    SpecError,
    UnavailableError,
)
from dlion_api.names import GROUP

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)"'
    r'(?: in API group "(?P<group>[^"]*)")?'
    r'(?: in the namespace "(?P<namespace>[^"]*)"| (?P<scope>at the cluster scope))?'
)
_OBJECT = re.compile(r'^Invalid value: (?:"object"|"(?:\\.|[^"\\])*"|[^:]{0,200}): ')
_CRD: Final = f"dlionjobs.{GROUP}"
NEW_RUN: Final = (
    "A run keeps these settings to its end. For a new run, wait for the end of this one (or "
    "`dlion delete` it) and submit with another runId: --set runId=…"
)
_NO_ANSWER: Final = (
    (re.compile("refused"), "nothing listens there"),
    (re.compile("timed out|timeout", re.IGNORECASE), "no answer in time"),
    (re.compile("name resolution|not known|No address|resolve", re.IGNORECASE), "no such host"),
    (re.compile("certificate verify failed|CERTIFICATE_VERIFY", re.IGNORECASE),
     "its certificate is not one that the kubeconfig trusts"),
    (re.compile("No route|unreachable", re.IGNORECASE), "no route to it"),
)  # fmt: skip


def refusal(code: int, content: bytes | str, *, context: str) -> DLionError:
    """The error for an answer with that code and body (a `metav1.Status`, as a rule)."""
    status = _status(content)
    said = str(status.get("message", "")).strip()
    if code == 401:
        return DeniedError(
            f"the API server does not accept who you are (401, context {context!r}): the token or "
            "certificate has expired or is not known there. Log in anew, or choose another "
            "--context"
        )
    if code == 403:
        return DeniedError(_forbidden(said, context))
    if code == 404:
        return _not_found(status, said, context)
    if code == 409:
        return DeniedError(_conflict(status, said))
    if code == 410:
        return UnavailableError(f"the API server no longer has that version: {said}")
    if code in (400, 422):
        return _invalid(status, said or f"the API server answers {code}")
    if code == 429 or code >= 500:
        return UnavailableError(
            f"the API server cannot answer just now ({code}): {said or 'no reason given'}. "
            "Try again in a moment"
        )
    return UnavailableError(f"the API server answers {code}: {said or 'no reason given'}")


def unreachable(server: str, error: Exception, *, context: str) -> UnavailableError:
    """The error for a server that gave no answer, or not the whole of it."""
    text = str(error)
    why = next((words for found, words in _NO_ANSWER if found.search(text)), text or repr(error))
    return UnavailableError(
        f"no API server answers at {server} (context {context!r}): {why}. Check the network and "
        "the kubeconfig's server, or choose another --context"
    )


def _status(content: bytes | str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if isinstance(document, dict):
        return document
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    return {"message": text[:500]}


def _forbidden(said: str, context: str) -> str:
    found = _FORBIDDEN.search(said)
    if found is None:
        return f"the API server forbids it (403, context {context!r}): {said}"
    group, verb, resource = found["group"] or "", found["verb"], found["resource"]
    kind = f"{resource.split('/')[0]}{'.' + group if group else ''}"
    namespace = found["namespace"]
    where = f"in namespace {namespace}" if namespace else "in the whole cluster"
    role = "role" if namespace else "clusterrole"
    option = f" -n {namespace}" if namespace else ""
    sub = "/" + resource.split("/", 1)[1] if "/" in resource else ""
    return (
        f"user {found['user']!r} may not {verb} {kind}{sub} {where} (403). The right is given by "
        f"an administrator: kubectl create {role} NAME --verb={verb} --resource={kind}{sub}"
        f"{option}, and a {role}binding to that user"
    )


def _not_found(status: dict[str, Any], said: str, context: str) -> DLionError:
    details = status.get("details") or {}
    kind, name = str(details.get("kind", "")), str(details.get("name", ""))
    if not name:
        return AbsentError(
            f"this cluster (context {context!r}) does not know DLionJobs: the definition {_CRD} is "
            "not installed. Install the operator (helm install dlion helm/dlion), or the "
            "definition alone: kubectl apply --server-side -f crds/dlionjob.yaml"
        )
    if kind == "namespaces":
        return AbsentError(
            f"there is no namespace {name!r} (context {context!r}). Make it: kubectl create "
            f"namespace {name}; or choose another with -n"
        )
    if kind == "dlionjobs":
        return AbsentError(
            f"there is no DLionJob {name!r} here (context {context!r}). `dlion get` lists what "
            "there is, `dlion get -A` in all namespaces"
        )
    return AbsentError(f"{said or f'{kind} {name} not found'} (context {context!r})")


def _conflict(status: dict[str, Any], said: str) -> str:
    causes = (status.get("details") or {}).get("causes") or ()
    fields = [
        f"{str(cause.get('field', '')).lstrip('.')} ({cause.get('message', '')})"
        for cause in causes
        if cause.get("reason") == "FieldManagerConflict"
    ]
    if not fields:
        return f"somebody else changed it at the same time: {said}. Try again"
    return (
        f"others have set these fields otherwise: {'; '.join(fields)}. Leave them out of the "
        "manifest, or take them over with --force-conflicts"
    )


def _invalid(status: dict[str, Any], said: str) -> DLionError:
    causes = (status.get("details") or {}).get("causes") or ()
    problems = [_problem(cause) for cause in causes if isinstance(cause, dict)]
    return SpecError(problems or [Problem("(manifest)", said)], source="the API server")


def _problem(cause: dict[str, Any]) -> Problem:
    message = _OBJECT.sub("", str(cause.get("message", "")))
    keeps_run = "only together with runId" in message or "may change without runId" in message
    early = "runId may change only after" in message
    advice = NEW_RUN if keeps_run else ""
    if early:
        advice = "Wait for its end (`dlion watch`), or `dlion delete` it first"
    return Problem(str(cause.get("field", "")) or "(manifest)", message, advice=advice)

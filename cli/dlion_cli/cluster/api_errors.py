"""Errors of an API server as errors of the command line, with what to do."""

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
from dlion_cli.cluster.documents import mapping_of, mappings_in

_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)"'
    r'(?: in API group "(?P<group>[^"]*)")?'
    r'(?: in the namespace "(?P<namespace>[^"]*)"| (?P<scope>at the cluster scope))?'
)
_IMPERSONATED = re.compile(r'\S+ "([^"]*)" is forbidden')
_OBJECT = re.compile(r'^Invalid value: (?:"object"|"(?:\\.|[^"\\])*"|[^:]{0,200}): ')
_CRD: Final = f"dlionjobs.{GROUP}"
NEW_RUN: Final = (
    "These settings are fixed during a run. For a new run, wait for the end of this one (or "
    "`dlion delete` it) and submit with another runId: --set runId=…"
)
_CHECK_NETWORK: Final = "Check the network and the kubeconfig's server"
_CHECK_CLOCKS: Final = "Synchronize the clocks of this machine and the server by NTP"
_CONNECTION_ERRORS: Final = (
    (re.compile("certificate is not yet valid"),
     "its certificate is not valid yet by this machine's clock", _CHECK_CLOCKS),
    (re.compile("certificate has expired"),
     "its certificate has expired by this machine's clock",
     f"Renew the server's certificate (kubeadm certs renew). {_CHECK_CLOCKS}"),
    (re.compile("certificate is not valid for|doesn't match"),
     "its certificate is for other names than this one",
     "Name one of them as the kubeconfig's server, or with --tls-server-name"),
    (re.compile("certificate verify failed|CERTIFICATE_VERIFY", re.IGNORECASE),
     "its certificate is not one that the kubeconfig trusts",
     "Take a new kubeconfig (its authority is of another cluster), or --certificate-authority"),
    (re.compile("WRONG_VERSION_NUMBER|record layer failure|wrong version number"),
     "the port does not speak TLS", _CHECK_NETWORK),
    (re.compile("Redirect limit"), "it redirects to another server",
     "Name that one as the kubeconfig's server, or with --server"),
    (re.compile("refused"), "nothing listens there", _CHECK_NETWORK),
    (re.compile("timed out|timeout", re.IGNORECASE), "no answer in time", _CHECK_NETWORK),
    (re.compile("name resolution|not known|No address|resolve", re.IGNORECASE),
     "no such host", _CHECK_NETWORK),
    (re.compile("No route|unreachable", re.IGNORECASE), "no route to it", _CHECK_NETWORK),
)  # fmt: skip
"""Pattern of the error's text, what it means, and what to do."""


class CredentialsRejectedError(DeniedError):
    """The API server does not know who asks (401): no other request will do better."""


def api_error(code: int, content: bytes | str, *, path: str, context: str) -> DLionError:
    """The error for a response from that path with that code and body, usually a
    `metav1.Status`."""
    status = _status(content)
    message = str(status.get("message") or "").strip()
    if code == 401:
        return CredentialsRejectedError(
            f"the API server rejects your credentials (401, context {context!r}): the token or "
            "certificate has expired or is unknown. Log in again, or choose another --context"
        )
    if code == 403:
        return DeniedError(_forbidden(message, context))
    if code == 404:
        return _not_found(status, message, path, context)
    if code == 409:
        return DeniedError(_conflict(status, message))
    if code == 410:
        return UnavailableError(f"the API server no longer has that version: {message}")
    if code in (400, 422):
        return _invalid(status, message or f"the API server answers {code}")
    if code == 429 or code >= 500:
        return UnavailableError(
            f"the API server is temporarily unavailable ({code}): "
            f"{message or 'no reason given'}. Retry in a moment"
        )
    return UnavailableError(f"the API server answers {code}: {message or 'no reason given'}")


def unreachable_error(server: str, error: Exception, *, context: str) -> UnavailableError:
    """The error for a missing or incomplete response."""
    text = str(error)
    why, advice = next(
        ((reason, then) for pattern, reason, then in _CONNECTION_ERRORS if pattern.search(text)),
        (text or repr(error), _CHECK_NETWORK),
    )
    return UnavailableError(
        f"no API server answers at {server} (context {context!r}): {why}. {advice}, or choose "
        "another --context"
    )


def _status(content: bytes | str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        return document
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    return {"message": text[:500]}


def _forbidden(message: str, context: str) -> str:
    denied = _FORBIDDEN.search(message)
    if denied is None:
        return f"the API server forbids it (403, context {context!r}): {message}"
    if denied["verb"].startswith("impersonate"):
        return _not_impersonated(message, denied)
    group, verb, resource = denied["group"] or "", denied["verb"], denied["resource"]
    kind = f"{resource.split('/')[0]}{'.' + group if group else ''}"
    namespace = denied["namespace"]
    where = f"in namespace {namespace}" if namespace else "in the whole cluster"
    role = "role" if namespace else "clusterrole"
    option = f" -n {namespace}" if namespace else ""
    sub = "/" + resource.split("/", 1)[1] if "/" in resource else ""
    return (
        f"user {denied['user']!r} may not {verb} {kind}{sub} {where} (403). "
        f"An administrator can grant it: kubectl create {role} NAME --verb={verb} "
        f"--resource={kind}{sub}{option}, and a {role}binding to that user"
    )


def _not_impersonated(message: str, denied: re.Match[str]) -> str:
    """The message for `--as` or `--as-group` of a user who may not do so."""
    named = _IMPERSONATED.match(message)
    what = f"{denied['resource'].removesuffix('s')} {named[1]!r}" if named else denied["resource"]
    return (
        f"user {denied['user']!r} may not act as {what} (--as, 403). An administrator can grant "
        f"it: kubectl create clusterrole NAME --verb=impersonate --resource={denied['resource']}, "
        "and a clusterrolebinding to that user; or leave out --as and --as-group (in the "
        "kubeconfig: `as`)"
    )


def _not_found(status: dict[str, Any], message: str, path: str, context: str) -> DLionError:
    details = mapping_of(status.get("details"))
    kind, name = str(details.get("kind", "")), str(details.get("name", ""))
    if not name and GROUP not in path:
        return AbsentError(
            f"this cluster (context {context!r}) has nothing at {path} (404): its API is not "
            "installed, or in another version only"
        )
    if not name:
        return AbsentError(
            f"this cluster (context {context!r}) does not know DLionJobs: the definition {_CRD} is "
            "not installed. Install the operator (helm install dlion helm/dlion), or only the "
            "definition: kubectl apply --server-side -f crds/dlionjob.yaml"
        )
    if kind == "namespaces":
        return AbsentError(
            f"there is no namespace {name!r} (context {context!r}). Create it: kubectl create "
            f"namespace {name}; or choose another with -n"
        )
    if kind == "dlionjobs":
        return AbsentError(
            f"there is no DLionJob {name!r} here (context {context!r}). `dlion get` lists the "
            "jobs, `dlion get -A` those of all namespaces"
        )
    return AbsentError(f"{message or f'{kind} {name} not found'} (context {context!r})")


def _conflict(status: dict[str, Any], message: str) -> str:
    causes = mappings_in(mapping_of(status.get("details")).get("causes"))
    fields = [
        f"{str(cause.get('field', '')).lstrip('.')} ({cause.get('message', '')})"
        for cause in causes
        if cause.get("reason") == "FieldManagerConflict"
    ]
    if not fields:
        return f"another client changed it at the same time: {message}. Retry"
    return (
        f"other field managers set these fields: {'; '.join(fields)}. Remove them from the "
        "manifest, or take ownership with --force-conflicts"
    )


def _invalid(status: dict[str, Any], message: str) -> DLionError:
    causes = mappings_in(mapping_of(status.get("details")).get("causes"))
    problems = [_problem(cause) for cause in causes if cause]
    return SpecError(problems or [Problem("(manifest)", message)], source="the API server")


def _problem(cause: dict[str, Any]) -> Problem:
    message = _OBJECT.sub("", str(cause.get("message", "")))
    keeps_run = "only together with runId" in message or "may change without runId" in message
    early = "runId may change only after" in message
    advice = NEW_RUN if keeps_run else ""
    if early:
        advice = "Wait for its end (`dlion watch`), or `dlion delete` it first"
    return Problem(str(cause.get("field", "")) or "(manifest)", message, advice=advice)

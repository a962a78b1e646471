"""Selects kubeconfig files, context and namespace by kubectl's rules; reads no credentials."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from dlion_api.errors import DataError
from dlion_api.suggestions import did_you_mean
from dlion_cli.cluster.connection_settings import ConnectionSettings

DEFAULT_NAMESPACE: Final = "default"
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class KubeContext:
    """A selected context."""

    files: str
    """The paths that the client takes; empty: there is no file, and options name the server."""
    name: str
    """Empty: none, and options name a cluster or server."""
    namespace: str


def choose_context(
    given: ConnectionSettings, environment: Mapping[str, str] = os.environ
) -> KubeContext | None:
    """The context that the options select; None: use the pod's service account.

    `$KUBECONFIG` may name several files; the first definition of a value applies. Raises: DataError
    if there is no file, an invalid file, or no such context, cluster or user.
    """
    paths = _paths(given.kubeconfig, environment)
    existing = [path for path in paths if path.is_file()]
    if not existing:
        if not given.names_entry and given.server:
            return KubeContext("", "", DEFAULT_NAMESPACE)
        if not given.names_entry and environment.get("KUBERNETES_SERVICE_HOST"):
            return None
        raise DataError(
            f"no kubeconfig file at {', '.join(map(str, paths))}. Name one with --kubeconfig or "
            "$KUBECONFIG"
        )
    documents = [_read(path) for path in existing]
    files = os.pathsep.join(map(str, existing))
    for kind, name in (("cluster", given.cluster), ("user", given.user)):
        if name and name not in (known := _names(documents, kind)):
            raise _absent_entry(files, kind, name, known)
    name = given.context or next(filter(None, (d.get("current-context") for d in documents)), "")
    if not name and (given.cluster or given.server):
        return KubeContext(files, "", DEFAULT_NAMESPACE)
    return KubeContext(files, str(name), _namespace(documents, str(name), files))


def is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a kubeconfig, or this process runs in a pod."""
    in_pod = bool(environment.get("KUBERNETES_SERVICE_HOST"))
    return in_pod or any(path.is_file() for path in _paths(None, environment))


def entry_names(
    kind: str, kubeconfig: str | None, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """The names of all `contexts`, `clusters` or `users`. Raises: DataError for an invalid file."""
    existing = [path for path in _paths(kubeconfig, environment) if path.is_file()]
    return _names([_read(path) for path in existing], kind.removesuffix("s"))


def pod_namespace() -> str:
    """The namespace of the pod in which this process runs."""
    try:
        return (_SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip() or DEFAULT_NAMESPACE
    except OSError:
        return DEFAULT_NAMESPACE


def _paths(kubeconfig: str | None, environment: Mapping[str, str]) -> list[Path]:
    if kubeconfig:
        return [Path(kubeconfig).expanduser()]
    named = [part for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    return [Path(part).expanduser() for part in named or ["~/.kube/config"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"kubeconfig {path}: cannot be read: {error}") from None
    if document is not None and not isinstance(document, dict):
        raise DataError(f"kubeconfig {path}: is no kubeconfig file: it contains no mapping")
    return document or {}


def _entries(documents: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The well-formed entries of a kind: `context`, `cluster` or `user`."""
    return [
        entry
        for document in documents
        for entry in document.get(f"{kind}s") or ()
        if isinstance(entry, dict) and isinstance(entry.get(kind), dict)
    ]


def _names(documents: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    return list(dict.fromkeys(str(entry.get("name")) for entry in _entries(documents, kind)))


def _namespace(documents: Sequence[Mapping[str, Any]], name: str, files: str) -> str:
    for entry in _entries(documents, "context"):
        if entry.get("name") == name:
            return str(entry["context"].get("namespace") or DEFAULT_NAMESPACE)
    raise _absent_entry(files, "context", name, _names(documents, "context"))


def _absent_entry(files: str, kind: str, name: str, known: Sequence[str]) -> DataError:
    what = f"there is no {kind} {name!r}" if name else f"no {kind} is the current one"
    hint = did_you_mean(name, known) or f"Choose one with --{kind}"
    return DataError(f"kubeconfig {files}: {what}; it has: {', '.join(known) or 'none'}. {hint}")

"""Selects kubeconfig files, context and namespace by kubectl's rules; reads no credentials."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from dlion_api.errors import DataError

DEFAULT_NAMESPACE: Final = "default"
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class KubeContext:
    """A selected context. `files` is the list of paths that the client takes."""

    files: str
    name: str
    namespace: str


def choose_context(
    kubeconfig: str | None, context: str | None, environment: Mapping[str, str] = os.environ
) -> KubeContext | None:
    """The context that `--kubeconfig` and `--context` select; None: use the pod's service account.

    `$KUBECONFIG` may name several files; the first definition of a value applies. Raises: DataError
    if there is no file, an invalid file, or no such context.
    """
    paths = _paths(kubeconfig, environment)
    existing = [path for path in paths if path.is_file()]
    if not existing:
        if not kubeconfig and not context and environment.get("KUBERNETES_SERVICE_HOST"):
            return None
        raise DataError(
            f"no kubeconfig file at {', '.join(map(str, paths))}. Name one with --kubeconfig or "
            "$KUBECONFIG"
        )
    documents = [_read(path) for path in existing]
    files = os.pathsep.join(map(str, existing))
    name = context or next(filter(None, (d.get("current-context") for d in documents)), "")
    return KubeContext(files, str(name), _namespace(documents, str(name), files))


def is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a kubeconfig, or this process runs in a pod."""
    in_pod = bool(environment.get("KUBERNETES_SERVICE_HOST"))
    return in_pod or any(path.is_file() for path in _paths(None, environment))


def context_list(kubeconfig: str | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The names of all contexts. Raises: DataError for an invalid file."""
    existing = [path for path in _paths(kubeconfig, environment) if path.is_file()]
    entries = _contexts([_read(path) for path in existing])
    return list(dict.fromkeys(str(entry.get("name")) for entry in entries))


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


def _contexts(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        entry
        for document in documents
        for entry in document.get("contexts") or ()
        if isinstance(entry, dict) and isinstance(entry.get("context"), dict)
    ]


def _namespace(documents: Sequence[Mapping[str, Any]], name: str, files: str) -> str:
    contexts = _contexts(documents)
    for entry in contexts:
        if entry.get("name") == name:
            return str(entry["context"].get("namespace") or DEFAULT_NAMESPACE)
    known = ", ".join(dict.fromkeys(str(entry.get("name")) for entry in contexts)) or "none"
    what = f"there is no context {name!r}" if name else "no context is the current one"
    raise DataError(f"kubeconfig {files}: {what}; it has: {known}. Choose one with --context")

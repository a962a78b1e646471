"""Which kubeconfig files, context and namespace are meant, by kubectl's rules.

Called by `cluster`. Reads no credentials: those are the Kubernetes client's business.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from dlion_api.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_NAMESPACE: Final = "default"
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Context:
    """A context that was chosen: its files as the client takes them, its name, its namespace."""

    files: str
    name: str
    namespace: str


def chosen_context(
    kubeconfig: str | None, context: str | None, environment: Mapping[str, str] = os.environ
) -> Context | None:
    """What `--kubeconfig` and `--context` come to; None: no file is there, but this is a pod.

    `$KUBECONFIG` may name several files; what stands in an earlier one counts. Raises: DataError
    where there is no file, none that can be read, or no such context in it.
    """
    paths = _paths(kubeconfig, environment)
    there = [path for path in paths if path.is_file()]
    if not there:
        if not kubeconfig and not context and environment.get("KUBERNETES_SERVICE_HOST"):
            return None
        raise DataError(
            f"no kubeconfig file at {', '.join(map(str, paths))}. Name one with --kubeconfig or "
            "$KUBECONFIG"
        )
    documents = [_read(path) for path in there]
    files = os.pathsep.join(map(str, there))
    name = context or next(filter(None, (d.get("current-context") for d in documents)), "")
    return Context(files, str(name), _namespace(documents, str(name), files))


def pod_namespace() -> str:
    """The namespace of the pod that this runs in."""
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
        raise DataError(f"kubeconfig {path}: is no kubeconfig file: it holds no mapping")
    return document or {}


def _namespace(documents: Sequence[Mapping[str, Any]], name: str, files: str) -> str:
    contexts = [
        entry
        for document in documents
        for entry in document.get("contexts") or ()
        if isinstance(entry, dict) and isinstance(entry.get("context"), dict)
    ]
    for entry in contexts:
        if entry.get("name") == name:
            return str(entry["context"].get("namespace") or DEFAULT_NAMESPACE)
    known = ", ".join(dict.fromkeys(str(entry.get("name")) for entry in contexts)) or "none"
    what = f"there is no context {name!r}" if name else "no context is the current one"
    raise DataError(f"kubeconfig {files}: {what}; it has: {known}. Choose one with --context")

"""Selects kubeconfig files, context, cluster and user by kubectl's rules.

`connections` and `credentials` use what it selects.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import yaml

from dlion_api.addresses import join_host_port
from dlion_api.errors import DataError
from dlion_api.suggestions import did_you_mean
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.documents import mapping_of, mappings_in

DEFAULT_NAMESPACE: Final = "default"
_HEADER_CHARACTERS: Final = "!#$&'*+-.^_`|~"
"""The characters of RFC 9110 that a header's name may contain besides letters and digits."""
_PATHS: Final = {
    "cluster": ("certificate-authority",),
    "user": ("client-certificate", "client-key", "tokenFile"),
}
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class KubeContext:
    """A selected context, with the changes of the options. Its paths are absolute."""

    files: str
    """The paths of its files; empty: there is no file, but options or a pod."""
    name: str
    """Empty: none, and options name a cluster or server."""
    namespace: str
    cluster: Mapping[str, Any]
    """Empty: the files have no such cluster."""
    user: Mapping[str, Any] = field(repr=False)
    """Empty: a user without credentials."""
    impersonation: tuple[tuple[str, str], ...] = ()
    """Headers by which the user acts as another."""


def choose_context(
    given: ConnectionSettings, environment: Mapping[str, str] = os.environ
) -> KubeContext:
    """The context that the options select, or without a file that of the pod's service account.

    `$KUBECONFIG` may name several files; the first definition of a value applies. Raises: DataError
    if there is no file, an invalid file, no such context, cluster or user, or a user with
    impersonation that is invalid; or in a pod, if options need a server.
    """
    paths = _paths(given.kubeconfig, environment)
    found = {path: _read(path) for path in paths if _may_exist(path)}
    filled = {path: document for path, document in found.items() if document}
    if not filled:
        may_lack = not given.names_entry and bool(found or not given.kubeconfig)
        if may_lack and given.server:
            return _selected(given, [], files="", name="", context={})
        if may_lack and environment.get("KUBERNETES_SERVICE_HOST"):
            return _of_pod(given, environment)
        what = "nothing in the kubeconfig" if found else "no kubeconfig file at"
        raise DataError(
            f"{what} {', '.join(map(str, found or paths))}. Name one with --kubeconfig or "
            "$KUBECONFIG"
        )
    documents = list(filled.values())
    files = os.pathsep.join(map(str, filled))
    for kind, name in (("cluster", given.cluster), ("user", given.user)):
        if name and name not in (known := _names(documents, kind)):
            raise _absent_entry(files, kind, name, known)
    name = given.context or next(filter(None, (d.get("current-context") for d in documents)), "")
    if not name and (given.cluster or given.server):
        return _selected(given, documents, files=files, name="", context={})
    context = _context(documents, str(name), files)
    return _selected(given, documents, files=files, name=str(name), context=context)


def is_configured() -> bool:
    """Whether there is a kubeconfig, or this process runs in a pod."""
    in_pod = bool(os.environ.get("KUBERNETES_SERVICE_HOST"))
    return in_pod or any(map(_may_exist, _paths(None, os.environ)))


def entry_names(kind: str, kubeconfig: str | None) -> list[str]:
    """The names of all `contexts`, `clusters` or `users`. Raises: DataError for an invalid file."""
    existing = filter(_may_exist, _paths(kubeconfig, os.environ))
    return _names([_read(path) for path in existing], kind.removesuffix("s"))


def _of_pod(given: ConnectionSettings, environment: Mapping[str, str]) -> KubeContext:
    """The cluster of the pod in which this process runs, and its service account."""
    if given.token or given.changes_server:
        raise DataError("this pod has no kubeconfig: options of the connection need --server too")
    try:
        namespace = (_SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip()
    except OSError:
        namespace = ""
    host, port = (environment.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not (port or "443").isdecimal():
        raise DataError(f"$KUBERNETES_SERVICE_PORT is {port!r}; allowed: the number of a port")
    return KubeContext(
        "",
        "(this pod)",
        namespace or DEFAULT_NAMESPACE,
        {
            "server": f"https://{join_host_port(host, int(port or 443))}",
            "certificate-authority": str(_SERVICE_ACCOUNT / "ca.crt"),
        },
        {"tokenFile": str(_SERVICE_ACCOUNT / "token")},
    )


def _paths(kubeconfig: str | None, environment: Mapping[str, str]) -> list[Path]:
    if kubeconfig:
        return [_expanded(kubeconfig)]
    named = [part for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    return [_expanded(part) for part in named or ["~/.kube/config"]]


def _expanded(path: str) -> Path:
    """The path, without `~` if there is such a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _may_exist(path: Path) -> bool:
    """Whether it is a file, or cannot be looked up, which is an error when it is read."""
    try:
        return path.is_file()
    except OSError:
        return True


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    # ValueError: no UTF-8, a date that does not exist, or an integer that is too long.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"kubeconfig {path}: cannot be read: {error}") from None
    if document is not None and not isinstance(document, dict):
        raise DataError(f"kubeconfig {path}: is not a kubeconfig file: it contains no mapping")
    return _with_absolute_paths(document or {}, path.absolute().parent)


def _with_absolute_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Relative paths of a kubeconfig start at its folder."""
    entries = [(each[kind], keys) for kind, keys in _PATHS.items()
               for each in _entries([document], kind)]  # fmt: skip
    plugins = [mapping_of(each["user"].get("exec")) for each in _entries([document], "user")]
    # A plugin's name without a slash is one of $PATH.
    entries += [(each, ("command",)) for each in plugins if "/" in str(each.get("command"))]
    for entry, keys in entries:
        for key in keys:
            if isinstance(given := entry.get(key), str) and given:
                entry[key] = str(folder / given)
    return document


def _selected(
    given: ConnectionSettings,
    documents: Sequence[Mapping[str, Any]],
    *,
    files: str,
    name: str,
    context: Mapping[str, Any],
) -> KubeContext:
    user = str(given.user or context.get("user") or "")
    cluster = _fields(documents, "cluster", str(given.cluster or context.get("cluster") or ""))
    return KubeContext(
        files,
        name,
        str(context.get("namespace") or DEFAULT_NAMESPACE),
        _changed(cluster, given),
        {"token": given.token} if given.token else _fields(documents, "user", user),
        _impersonation(documents, user, files),
    )


def _changed(cluster: Mapping[str, Any], given: ConnectionSettings) -> dict[str, Any]:
    """The cluster's fields with the options' changes, as kubectl applies them."""
    changed = dict(cluster)
    if given.server:
        changed.pop("tls-server-name", None)  # it was the other server's
        changed["server"] = given.server
    if given.certificate_authority or given.insecure_skip_tls_verify:
        for key in ("certificate-authority", "certificate-authority-data"):
            changed.pop(key, None)
        changed["insecure-skip-tls-verify"] = given.insecure_skip_tls_verify
    if given.certificate_authority:
        changed["certificate-authority"] = given.certificate_authority
    if given.tls_server_name:
        changed["tls-server-name"] = given.tls_server_name
    return changed


def _fields(documents: Sequence[Mapping[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The fields of the first entry of that name; empty without one."""
    named = (each[kind] for each in _entries(documents, kind) if str(each.get("name")) == name)
    return next(named, {})


def _entries(documents: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The well-formed entries of a kind: `context`, `cluster` or `user`."""
    return [
        entry
        for document in documents
        for entry in mappings_in(document.get(f"{kind}s"))
        if isinstance(entry.get(kind), dict)
    ]


def _names(documents: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    return list(dict.fromkeys(str(entry.get("name")) for entry in _entries(documents, kind)))


def _context(documents: Sequence[Mapping[str, Any]], name: str, files: str) -> Mapping[str, Any]:
    known = _names(documents, "context")
    if name not in known:
        raise _absent_entry(files, "context", name, known)
    return _fields(documents, "context", name)


def _impersonation(
    documents: Sequence[Mapping[str, Any]], user: str, files: str
) -> tuple[tuple[str, str], ...]:
    """The headers of the user's `as`, `as-uid`, `as-groups` and `as-user-extra`.

    Raises: DataError for a value that no header carries, and for others without `as`: without an
    error the user would act with more rights than the file gives.
    """
    given = _fields(documents, "user", user)
    single = [("User", given.get("as")), ("Uid", given.get("as-uid"))]
    headers = [(kind, value) for kind, value in single if value not in (None, "")]
    headers += [("Group", each) for each in _listed(given.get("as-groups"))]
    for key, values in _mapping(given.get("as-user-extra")).items():
        name = f"Extra-{quote(str(key), safe=_HEADER_CHARACTERS)}"
        headers += [(name, each) for each in _listed(values)]
    if not all(_is_header_value(value) for _, value in headers):
        raise DataError(
            f"kubeconfig {files}: user {user!r}: as, as-uid, as-groups or as-user-extra has a "
            "value that is empty or no text in ASCII. Write as: NAME, as-groups: [NAME, …]"
        )
    if headers and not given.get("as"):
        raise DataError(
            f"kubeconfig {files}: user {user!r}: as-uid, as-groups and as-user-extra need as: NAME"
        )
    return tuple((f"Impersonate-{kind}", str(value)) for kind, value in headers)


def _listed(value: object) -> list[object]:
    """The values of a list; a value that is not a list has one that is invalid."""
    return value if isinstance(value, list) else [] if value is None else [None]


def _mapping(value: object) -> Mapping[object, object]:
    return value if isinstance(value, dict) else {} if value is None else {"": 0}


def _is_header_value(value: object) -> bool:
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        return False
    return bool(value) and value == value.strip()


def _absent_entry(files: str, kind: str, name: str, known: Sequence[str]) -> DataError:
    what = f"there is no {kind} {name!r}" if name else f"no {kind} is the current one"
    hint = did_you_mean(name, known) or f"Choose one with --{kind}"
    return DataError(f"kubeconfig {files}: {what}; it has: {', '.join(known) or 'none'}. {hint}")

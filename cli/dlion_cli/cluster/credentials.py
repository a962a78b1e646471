"""Credentials of a kubeconfig's user.

Tokens, passwords and certificates are read here, and credential plugins run. The Kubernetes client
refreshes tokens of OpenID Connect. Its import takes longer than all else of a command, so that only
these users import it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import DataError, UnavailableError
from dlion_cli.cluster.documents import mapping_of, mappings_in
from dlion_cli.terminal.failures import install_advice

_ONLY: Final = "(selected)"
"""The name of all entries in the kubeconfig that the Kubernetes client gets."""
_EXTENSION: Final = "client.authentication.k8s.io/exec"
"""The extension of a cluster that plugins get."""


@dataclass(frozen=True)
class UserCredentials:
    """What a connection presents to an API server."""

    authorization: Callable[[], str] | None = None
    """The header of the next request, renewed where it can be; None: there is none."""
    certificate: bytes | None = None
    """PEM; None: there is none."""
    key: bytes | None = field(default=None, repr=False)
    """PEM of the certificate's key."""
    renewed: Callable[[], UserCredentials] | None = None
    """The credentials for the next request; None: these stay. One thread at a time may call it."""
    refused: Callable[[], None] = lambda: None
    """Called when an API server has refused them."""


def credentials_of(user: Mapping[str, Any], cluster: Mapping[str, Any]) -> UserCredentials:
    """The credentials of a user of a kubeconfig, for that cluster. May run a credential plugin.

    Raises: OSError, ValueError, TypeError, KeyError or AttributeError for fields that cannot be
    used; UnavailableError if the Kubernetes client is needed and not installed.
    """
    _check_unambiguous(user)
    authorization = _authorization(user)
    certificate, key = (content(user, f"client-{part}") for part in ("certificate", "key"))
    if certificate is not None and key is None:
        raise ValueError("its client-certificate needs a client-key or client-key-data")
    # As for kubectl: other credentials come first.
    if authorization is None and user.get("auth-provider"):
        authorization = _refreshed(user["auth-provider"])
    if authorization is None and certificate is None and user.get("exec"):
        return _CredentialPlugin(user["exec"], cluster).credentials()
    return UserCredentials(authorization, certificate, key)


def content(fields: Mapping[str, Any], name: str) -> bytes | None:
    """What a kubeconfig has as base64 in `<name>-data`, or in the file `name`.

    Raises: ValueError for both, as kubectl; OSError.
    """
    if fields.get(f"{name}-data") and fields.get(name):
        raise ValueError(f"it has both {name} and {name}-data")
    if data := fields.get(f"{name}-data"):
        return base64.standard_b64decode(data)
    return Path(path).read_bytes() if (path := fields.get(name)) else None


def _check_unambiguous(user: Mapping[str, Any]) -> None:
    """Raises: ValueError for credentials of several kinds, of which kubectl refuses these too."""
    username, password = user.get("username"), user.get("password")
    # A password without a username is never sent. kubectl refuses it beside `token`, and ignores
    # it beside `tokenFile`.
    if (user.get("token") and (username or password)) or (user.get("tokenFile") and username):
        raise ValueError("its user has both a token and a password: remove one")
    if user.get("exec") and user.get("auth-provider"):
        raise ValueError("its user has both exec and auth-provider: remove one")


def _authorization(user: Mapping[str, Any]) -> Callable[[], str] | None:
    token, path = user.get("token"), user.get("tokenFile")
    if path:
        file = Path(path)
        return lambda: f"Bearer {_token_in(file, token)}"  # another program may renew it
    if token:
        return lambda: f"Bearer {token}"
    if username := user.get("username"):
        if ":" in str(username):  # the server would take the rest for the password (RFC 7617)
            raise ValueError("its username contains a colon, which basic authentication excludes")
        pair = f"{username}:{user.get('password') or ''}".encode()
        return lambda: f"Basic {base64.b64encode(pair).decode()}"
    return None


def _token_in(path: Path, otherwise: object) -> object:
    """The file's token, or the other one where it has none."""
    try:
        token: object = path.read_text("utf-8").strip()
        error = "it is empty"
    except (OSError, UnicodeDecodeError) as problem:
        token, error = "", str(problem)
    if not (token or otherwise):
        raise DataError(f"token file {path}: cannot be read: {error}")
    return token or otherwise


class _CredentialPlugin:
    """A program that prints credentials. As for kubectl, it runs again once they have expired, or
    an API server has refused them."""

    def __init__(self, given: Mapping[str, Any], cluster: Mapping[str, Any]) -> None:
        """`given`: the fields of the user's `exec`."""
        self._given, self._cluster = given, cluster
        self._printed: UserCredentials | None = None
        self._expires: datetime | None = None

    def credentials(self) -> UserCredentials:
        """The credentials for the next request. Raises: as `credentials_of`."""
        printed = self._printed  # another thread may forget it
        is_expired = self._expires is not None and datetime.now(UTC) > self._expires
        if printed is None or is_expired:
            status = self._run()
            self._printed = printed = self._read(status)
            expires = status.get("expirationTimestamp")
            self._expires = datetime.fromisoformat(expires) if expires else None
        return printed

    def _run(self) -> dict[str, Any]:
        """The status that the program prints. As for kubectl, it may ask if standard input is a
        terminal. Otherwise its words are the error."""
        version, mode = self._given["apiVersion"], self._given.get("interactiveMode")
        is_interactive = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if mode == "Always" and not is_interactive:
            raise ValueError("exec: the plugin must ask, and standard input is no terminal")
        spec: dict[str, Any] = {"interactive": is_interactive}
        if self._given.get("provideClusterInfo"):
            extensions = mappings_in(self._cluster.get("extensions"))
            own = (each["extension"] for each in extensions if each.get("name") == _EXTENSION)
            spec["cluster"] = {**self._cluster, "config": next(own, None)}
        info = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
        added = {each["name"]: each["value"] for each in self._given.get("env") or ()}
        try:
            ended = subprocess.run(
                [self._given["command"], *(self._given.get("args") or ())],
                check=False,
                env={**os.environ, **added, "KUBERNETES_EXEC_INFO": json.dumps(info)},
                stdin=sys.stdin if is_interactive else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sys.stderr if is_interactive else subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError as error:
            hint = self._given.get("installHint") or "Install it, or correct its path"
            raise ValueError(f"exec: {error}. {hint}") from error
        if ended.returncode:
            words = f". {ended.stderr.strip()}" if ended.stderr else ""
            raise ValueError(f"exec: process returned {ended.returncode}{words}")
        try:
            printed = json.loads(ended.stdout)
        except ValueError:
            printed = None
        answer = mapping_of(printed)
        if answer.get("apiVersion") != version or not isinstance(answer.get("status"), dict):
            raise ValueError(f"exec: the plugin printed no credentials of {version}")
        return mapping_of(answer["status"])

    def _read(self, status: Mapping[str, str]) -> UserCredentials:
        token = status.get("token")
        certificate, key = (status.get(f"client{part}Data") for part in ("Certificate", "Key"))
        if not (token or certificate) or bool(certificate) != bool(key):
            raise ValueError("exec: the plugin prints no token, and no certificate with its key")
        return UserCredentials(
            (lambda: f"Bearer {token}") if token else None,
            certificate.encode() if certificate else None,
            key.encode() if key else None,
            self.credentials,
            self._forget,
        )

    def _forget(self) -> None:
        self._printed = None


def _refreshed(provider: object) -> Callable[[], str] | None:
    """The header with a token that the client refreshes; None: the provider has none."""
    entries = {"cluster": {}, "user": {"auth-provider": provider}}
    document = {f"{kind}s": [{"name": _ONLY, kind: each}] for kind, each in entries.items()}
    document["contexts"] = [{"name": _ONLY, "context": {"cluster": _ONLY, "user": _ONLY}}]
    with _client_errors() as library:
        from kubernetes.client import Configuration

        configuration = Configuration()
        library.kube_config.KubeConfigLoader(document, _ONLY).load_and_set(configuration)

    renewing = threading.Lock()

    def authorization() -> str:
        try:
            with renewing:
                return str(configuration.auth_settings()["BearerToken"]["value"])
        except Exception as error:  # each provider has its own classes
            raise UnavailableError(f"the credentials could not be renewed: {error}") from error

    return authorization if configuration.api_key else None


@contextlib.contextmanager
def _client_errors() -> Iterator[Any]:
    """The package of the Kubernetes client that loads a configuration.

    Raises: ValueError for the client's own errors; UnavailableError if it is not installed.
    """
    try:
        from kubernetes import config
    except ImportError as error:
        raise UnavailableError(
            f"the Kubernetes client for Python is missing ({error}). {install_advice('cluster')}"
        ) from None
    try:
        yield config
    except config.ConfigException as error:
        raise ValueError(str(error)) from error

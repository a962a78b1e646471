"""Credentials of a kubeconfig's user.

Tokens, passwords and certificates are read here. The Kubernetes client runs credential plugins and
refreshes tokens of OpenID Connect. Its import takes longer than all else of a command, so that only
these users import it.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import DataError, UnavailableError
from dlion_cli.terminal.failures import install_advice

_ONLY: Final = "(selected)"
"""The name of all entries in the kubeconfig that the Kubernetes client gets."""


@dataclass(frozen=True)
class UserCredentials:
    """What a connection presents to an API server."""

    authorization: Callable[[], str] | None = None
    """The header of the next request, renewed where it can be; None: there is none."""
    certificate: bytes | None = None
    """PEM; None: there is none."""
    key: bytes | None = field(default=None, repr=False)
    """PEM of the certificate's key."""


def credentials_of(user: Mapping[str, Any], cluster: Mapping[str, Any]) -> UserCredentials:
    """The credentials of a user of a kubeconfig, for that cluster. May run a credential plugin.

    Raises: OSError, ValueError, TypeError, KeyError or AttributeError for fields that cannot be
    used; UnavailableError if the Kubernetes client is needed and not installed.
    """
    authorization = _authorization(user)
    certificate, key = (content(user, f"client-{part}") for part in ("certificate", "key"))
    # As for kubectl: other credentials come first.
    is_renewed = user.get("auth-provider") or (user.get("exec") and certificate is None)
    if authorization is None and is_renewed:
        return _renewed(user, cluster)
    return UserCredentials(authorization, certificate, key)


def content(fields: Mapping[str, Any], name: str) -> bytes | None:
    """What a kubeconfig has as base64 in `<name>-data`, or else in the file `name`."""
    if data := fields.get(f"{name}-data"):
        return base64.standard_b64decode(data)
    return Path(path).read_bytes() if (path := fields.get(name)) else None


def _authorization(user: Mapping[str, Any]) -> Callable[[], str] | None:
    token, path = user.get("token"), user.get("tokenFile")
    if path:
        return lambda: f"Bearer {_token_in(Path(path), token)}"  # another program may renew it
    if token:
        return lambda: f"Bearer {token}"
    if username := user.get("username"):
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


def _renewed(user: Mapping[str, Any], cluster: Mapping[str, Any]) -> UserCredentials:
    entries = {"cluster": dict(cluster), "user": dict(user)}
    document = {f"{kind}s": [{"name": _ONLY, kind: each}] for kind, each in entries.items()}
    document["contexts"] = [{"name": _ONLY, "context": {"cluster": _ONLY, "user": _ONLY}}]
    with _client_errors() as (configuration, library):
        loader = library.kube_config.KubeConfigLoader(document, active_context=_ONLY)
        loader.load_and_set(configuration)

    renewing = threading.Lock()  # a plugin may ask the user

    def authorization() -> str:
        try:
            with renewing, _logged_errors():
                return str(configuration.auth_settings()["BearerToken"]["value"])
        except Exception as error:  # each provider has its own classes
            raise UnavailableError(f"the credentials could not be renewed: {error}") from error

    paths = (configuration.cert_file, configuration.key_file)
    certificate, key = (Path(path).read_bytes() if path else None for path in paths)
    return UserCredentials(authorization if configuration.api_key else None, certificate, key)


@contextlib.contextmanager
def _client_errors() -> Iterator[tuple[Any, Any]]:
    """A configuration of the Kubernetes client, and its package that loads one.

    Raises: ValueError for the client's own errors; it only logs those of a plugin.
    UnavailableError if it is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise UnavailableError(
            f"the Kubernetes client for Python is missing ({error}). {install_advice('cluster')}"
        ) from None
    try:
        with _logged_errors():
            yield client.Configuration(), config
    except config.ConfigException as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    """Raises: ValueError for errors that this thread logs inside."""
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.addFilter(lambda record: record.thread == threading.get_ident())
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    if errors:
        raise ValueError("; ".join(errors))

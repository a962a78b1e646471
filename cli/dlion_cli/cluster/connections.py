"""Configures the Kubernetes client of one connection, and opens WebSockets with it.

With `client` the only module of the command line that imports that client. It finds the server and
provides credentials, which it renews.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dlion_api.errors import DataError, UnavailableError
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.kubeconfig import KubeContext
from dlion_cli.terminal.failures import install_advice

_CHANGED: Final = "(options)"
"""The name of an entry of the kubeconfig that options have changed."""
_EXEC_PROTOCOLS: Final = "v5.channel.k8s.io,v4.channel.k8s.io"


def require_library() -> None:
    """Raises: UnavailableError if the Kubernetes client is not installed."""
    try:
        import kubernetes  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise UnavailableError(
            f"the Kubernetes client for Python is missing ({error}). {install_advice('cluster')}"
        ) from None


def api_client(settings: ConnectionSettings, chosen: KubeContext | None) -> Any:
    """The Kubernetes client of that context; None: of this pod's service account.

    Raises: DataError if the configuration is invalid, or would send credentials without TLS.
    """
    import urllib3
    from kubernetes import client, config

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # we report its warnings ourselves
    # The user has asked for it, in the kubeconfig or by an option; kubectl does not warn either.
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    _check_authorities(settings.certificate_authority)
    configuration = client.Configuration()
    configuration.keep_alive = True
    try:
        if chosen is None:
            _load_pod(settings, configuration)
        else:
            with _logged_errors() as errors:
                _load_kubeconfig(settings, chosen, configuration)
            if errors:
                raise ValueError("; ".join(errors))
        _check_encrypted(configuration)
        return client.ApiClient(configuration)
    except ImportError as error:  # the client imports it for such a proxy only
        where = "this pod" if chosen is None else _source(chosen)
        raise DataError(
            f"{where}: its SOCKS proxy needs a package that is not installed here ({error}). "
            "Install it: pip install PySocks"
        ) from error
    except (
        config.ConfigException,
        urllib3.exceptions.HTTPError,  # the URL of a proxy
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,  # the client does not check types
    ) as error:
        where = "this pod" if chosen is None else _source(chosen)
        raise DataError(f"{where}: cannot be used: {error}") from error


def open_websocket(
    configuration: Any, url: str, headers: list[tuple[str, str]], *, timeout_s: float | None
) -> Any:
    """A WebSocket for a command in a pod. Raises: WebSocketException, OSError.

    The Kubernetes client's own function sends no header but `authorization`: a command would run
    with the user's own rights where `--as` names another.
    """
    from kubernetes.stream import ws_client
    from websocket import WebSocket

    verified = configuration.verify_ssl
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_REQUIRED if verified else ssl.CERT_NONE}
    if verified:
        options["ca_certs"] = configuration.ssl_ca_cert
    else:
        options["check_hostname"] = False
    if configuration.cert_file:
        options |= {"certfile": configuration.cert_file, "keyfile": configuration.key_file}
    if configuration.tls_server_name:
        options["server_hostname"] = configuration.tls_server_name
    proxy: Any = ws_client.websocket_proxycare  # its functions have no types
    sent = [f"{name}: {value}" for name, value in headers]
    connecting: dict[str, Any] = {"header": [*sent, f"sec-websocket-protocol: {_EXEC_PROTOCOLS}"]}
    if configuration.proxy or configuration.proxy_headers:
        connecting = proxy(connecting, configuration, url, dict(headers))
    socket: Any = WebSocket(sslopt=options, skip_utf8_validation=False)
    socket.settimeout(timeout_s)
    # A redirect would take the credentials along, also to another server and without TLS.
    socket.connect(url, redirect_limit=0, **connecting)
    return socket


def _check_encrypted(configuration: Any) -> None:
    """Raises: DataError if credentials would reach another machine without TLS."""
    url = urlsplit(str(configuration.host))
    host = url.hostname or ""
    if not configuration.api_key or url.scheme == "https" or host == "localhost":
        return
    with contextlib.suppress(ValueError):  # a name
        if ip_address(host).is_loopback:
            return
    raise DataError(
        f"{url.scheme}://{url.netloc.rpartition('@')[2]}: credentials would be sent without TLS. "
        "Name the server with https://, or choose a user without credentials"
    )


def _check_authorities(path: str | None) -> None:
    """Raises: DataError if the file has no certificate."""
    if path is None:
        return
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise DataError(
            f"certificate authority {path}: has no certificate in PEM form ({error})"
        ) from None


def _load_pod(settings: ConnectionSettings, configuration: Any) -> None:
    from kubernetes import config

    if settings.token or settings.changes_server:
        raise ValueError("without a kubeconfig, options of the connection need --server too")
    loading: Any = config
    loading.load_incluster_config(client_configuration=configuration)


def _load_kubeconfig(settings: ConnectionSettings, chosen: KubeContext, configuration: Any) -> None:
    """Let the client read the files, with the entries that the options change."""
    from kubernetes.config import kube_config

    library: Any = kube_config
    empty: dict[str, list[object]] = {"clusters": [], "users": [], "contexts": []}
    merged = (
        library.KubeConfigMerger(chosen.files).config
        if chosen.files
        else library.ConfigNode("options", empty)
    )
    active = chosen.name
    context = _context(merged, chosen.name)
    user = settings.user or context.get("user")
    _resolve_paths(merged, user)
    if settings.cluster or settings.user or settings.token or settings.changes_server:
        active = _CHANGED
        cluster = settings.cluster or context.get("cluster")
        if settings.changes_server:
            _add_cluster(library, merged, cluster, settings)
            cluster = _CHANGED
        if settings.token:
            merged.value["users"].append({"name": _CHANGED, "user": {"token": settings.token}})
            user = _CHANGED
        changed = {"cluster": cluster, "user": user}
        merged.value["contexts"].append({"name": _CHANGED, "context": changed})
    loader = library.KubeConfigLoader(merged, active_context=active, config_base_path=None)
    loader.load_and_set(configuration)


def _context(merged: Any, name: str) -> Mapping[str, Any]:
    if not name:
        return {}
    entry: Mapping[str, Any] = merged["contexts"].get_with_name(name).value["context"]
    return entry


def _resolve_paths(merged: Any, user: str | None) -> None:
    """Make the user's paths absolute: the client takes those of a certificate as the cluster's."""
    entry = merged["users"].get_with_name(user, safe=True) if user else None
    if entry is None or entry.path is None:
        return
    given = entry.value["user"]
    for key in ("client-certificate", "client-key"):
        if isinstance(given, dict) and isinstance(given.get(key), str):
            given[key] = str(Path(entry.path).absolute().parent / given[key])


def _add_cluster(library: Any, merged: Any, name: str | None, settings: ConnectionSettings) -> None:
    """Add the cluster of that name with the options' changes, as kubectl applies them."""
    before = merged["clusters"].get_with_name(name, safe=bool(settings.server)) if name else None
    cluster = {} if before is None else dict(before.value["cluster"])
    if settings.server:
        cluster.pop("tls-server-name", None)  # it was the other server's
        cluster["server"] = settings.server
    if settings.certificate_authority or settings.insecure_skip_tls_verify:
        for key in ("certificate-authority", "certificate-authority-data"):
            cluster.pop(key, None)
        cluster["insecure-skip-tls-verify"] = settings.insecure_skip_tls_verify
    if settings.certificate_authority:
        cluster["certificate-authority"] = str(Path(settings.certificate_authority).absolute())
    if settings.tls_server_name:
        cluster["tls-server-name"] = settings.tls_server_name
    path = None if before is None else before.path  # base of relative paths of certificates
    changed = {"name": _CHANGED, "cluster": cluster}
    merged.value["clusters"].append(library.ConfigNode(_CHANGED, changed, path))


def _source(chosen: KubeContext) -> str:
    return f"kubeconfig {chosen.files}" if chosen.files else "the options of the connection"


@contextlib.contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect errors logged inside: the client only logs a credential plugin's failure."""
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield errors
    finally:
        logging.getLogger().removeHandler(handler)

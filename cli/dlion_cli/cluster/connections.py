"""Opens the connection to one API server: requests and WebSockets, with TLS and proxies.

With `client` the only module of the command line that imports urllib3 and websocket. `kubeconfig`
finds the server, `credentials` provides and renews what it presents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from dlion_api.errors import DataError, UnavailableError
from dlion_cli.cluster.connection_settings import ConnectionSettings, server_url
from dlion_cli.cluster.credentials import UserCredentials, content, credentials_of
from dlion_cli.cluster.kubeconfig import KubeContext
from dlion_cli.terminal.failures import install_advice

if TYPE_CHECKING:
    import urllib3

_EXEC_PROTOCOLS: Final = "v5.channel.k8s.io,v4.channel.k8s.io"
_MAX_IDLE_CONNECTIONS: Final = 16
_KEEP_ALIVE: Final = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 9}
"""As kubectl: proxies drop an idle watch without a message. Some systems lack some options."""


class Connection:
    """The way to one API server, with credentials. Thread-safe."""

    def __init__(self, cluster: Mapping[str, Any], credentials: UserCredentials) -> None:
        """`cluster`: the fields of a kubeconfig.

        Raises: ValueError, OSError, TypeError, AttributeError or urllib3's HTTPError for fields
        that cannot be used; ImportError for a SOCKS proxy without its package.
        """
        server = cluster.get("server")
        if not isinstance(server, str) or not server:
            raise ValueError("there is no such cluster, or it has no URL of a server")
        self.server: Final = server_url(server)
        url = urlsplit(self.server)
        self.credentials = credentials
        self._cluster = cluster
        self._tls = self._tls_context()
        self.proxy: Final = _proxy_of(url, cluster.get("proxy-url"))
        self.pool = self._open_pool()
        self._renewing = threading.Lock()  # a plugin may ask the user

    def renew(self) -> None:
        """Take new credentials for the next request where a plugin's have expired.

        As kubectl, open new connections for a new certificate: TLS presents one only at its start.
        Raises: UnavailableError if there are none that can be used.
        """
        renewed = self.credentials.renewed
        if renewed is None:
            return
        with self._renewing:
            before = self.credentials
            try:
                self.credentials = renewed()
                _check_encrypted(self)
                if self.credentials.certificate != before.certificate:
                    self._tls = self._tls_context()
            except Exception as error:  # whatever the plugin prints
                self.credentials = before
                raise UnavailableError(f"the credentials could not be renewed: {error}") from error
            if self.credentials.certificate != before.certificate:
                old, self.pool = self.pool, self._open_pool()
                old.clear()

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self.server.startswith("https:"):
            return None
        return _tls_context(self._cluster, self.credentials)

    def _open_pool(self) -> urllib3.PoolManager:
        import urllib3

        logging.getLogger("urllib3").setLevel(logging.ERROR)  # we report its warnings ourselves
        # The user has asked for it, in the kubeconfig or by an option; kubectl does not warn.
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        settings: dict[str, Any] = {
            "maxsize": _MAX_IDLE_CONNECTIONS,
            "socket_options": _socket_options(),
            "ssl_context": self._tls,
            "server_hostname": self._cluster.get("tls-server-name") or None,
        }
        if self.proxy is None:
            return urllib3.PoolManager(**settings)
        if self.proxy.startswith("socks"):
            from urllib3.contrib.socks import SOCKSProxyManager

            # As for kubectl, the proxy resolves names: it may reach servers that no name server
            # here knows.
            return SOCKSProxyManager(self.proxy.replace("socks5:", "socks5h:", 1), **settings)
        user = unquote(urlsplit(self.proxy).netloc.rpartition("@")[0])
        headers = urllib3.make_headers(proxy_basic_auth=user or None)
        return urllib3.ProxyManager(
            self.proxy, proxy_headers=headers, proxy_ssl_context=self._tls, **settings
        )

    def open_websocket(
        self, path: str, headers: list[tuple[str, str]], *, timeout_s: float | None
    ) -> Any:
        """A WebSocket at that path, for a command in a pod.

        Raises: WebSocketException, OSError, urllib3's HTTPError.
        """
        from websocket import WebSocket

        sent = [f"{name}: {value}" for name, value in headers]
        opened: Any = WebSocket(skip_utf8_validation=False)
        opened.settimeout(timeout_s)
        opened.connect(
            "ws" + self.server.removeprefix("http") + path,
            header=[*sent, f"sec-websocket-protocol: {_EXEC_PROTOCOLS}"],
            # A redirect would take the credentials along, also to another server without TLS.
            redirect_limit=0,
            socket=self._open_socket(timeout_s),
        )
        return opened

    def _open_socket(self, timeout_s: float | None) -> Any:
        """A socket to the server, through TLS and proxy as for requests: websocket knows neither
        all proxies nor the brackets of an IPv6 address in a tunnel."""
        pool: Any = self.pool.connection_from_url(self.server)
        server = urlsplit(self.server)
        near = pool if pool.proxy is None else pool.proxy
        connection = pool.ConnectionCls(
            host=near.host, port=near.port, timeout=timeout_s, **pool.conn_kw
        )
        if pool.proxy is not None:
            port = server.port or (443 if self._tls else 80)
            scheme = pool.proxy.scheme
            connection.set_tunnel(server.hostname, port, pool.proxy_headers, scheme)
        connection.connect()
        return connection.sock


def require_packages() -> None:
    """Raises: UnavailableError if the packages for connections are not installed."""
    try:
        import urllib3  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise UnavailableError(
            f"a package for connections is missing ({error}). {install_advice('cluster')}"
        ) from None


def open_connection(settings: ConnectionSettings, chosen: KubeContext) -> Connection:
    """The connection of that context. Sends no request.

    Raises: DataError if the configuration is invalid, or would send credentials without TLS;
    UnavailableError if the Kubernetes client is needed and not installed.
    """
    from urllib3.exceptions import HTTPError

    named = chosen.name or "the options of the connection"
    where = f"kubeconfig {chosen.files}" if chosen.files else named
    try:
        credentials = credentials_of(chosen.user, chosen.cluster)
        _check_authorities(settings.certificate_authority)
        connection = Connection(chosen.cluster, credentials)
    except ImportError as error:  # urllib3 imports it for such a proxy only
        raise DataError(
            f"{where}: its SOCKS proxy needs a package that is not installed here ({error}). "
            "Install it: pip install PySocks"
        ) from error
    except (
        HTTPError,  # the URL of a proxy
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,  # a value of another type
    ) as error:
        raise DataError(f"{where}: cannot be used: {error}") from error
    _check_encrypted(connection)
    return connection


def _tls_context(cluster: Mapping[str, Any], credentials: UserCredentials) -> ssl.SSLContext:
    pem = content(cluster, "certificate-authority")
    authority = None if pem is None else pem.decode("ascii", "ignore")  # comments may have others
    if authority is not None and not authority.strip():  # ssl would trust the system's instead
        raise ValueError("its certificate authority is empty")
    context = ssl.create_default_context(cadata=authority)
    # As Go: a trusted intermediate authority suffices, and certificates need no key identifiers.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if cluster.get("insecure-skip-tls-verify") is True:
        if authority is not None:  # kubectl refuses both, too
            raise ValueError("insecure-skip-tls-verify excludes a certificate authority")
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if credentials.certificate is not None:
        _load_certificate(context, credentials.certificate, credentials.key or b"")
    return context


def _load_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    with tempfile.NamedTemporaryFile() as shown, tempfile.NamedTemporaryFile() as secret:
        for file, pem in ((shown, certificate), (secret, key)):  # ssl reads files only
            file.write(pem)
            file.flush()
        # Without a password, OpenSSL would ask for that of an encrypted key.
        context.load_cert_chain(shown.name, secret.name if key else None, password="")


def _socket_options() -> list[tuple[int, int, int]]:
    from urllib3.connection import HTTPConnection

    options = list(HTTPConnection.default_socket_options)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            options.append((level, getattr(socket, name), value))
    return options


def _proxy_of(server: SplitResult, given: object) -> str | None:
    """The URL of the proxy, of the kubeconfig or the environment; None: there is none.

    As for kubectl, the environment's serves no server on this machine, and $NO_PROXY excepts none
    from the kubeconfig's.
    """
    if given:
        if not isinstance(given, str):
            raise TypeError("the URL of the proxy is no text")
        return given
    host = server.hostname or ""
    if _is_here(host) or not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from urllib.request import getproxies_environment

    proxies = getproxies_environment()
    proxy = proxies.get(server.scheme)
    if not proxy or _needs_no_proxy(server, proxies):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_here(host: str) -> bool:
    """Whether it is this machine's name, or one of its addresses that no other machine reaches."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):  # a name
        return ip_address(host).is_loopback
    return False


def _needs_no_proxy(server: SplitResult, proxies: dict[str, str]) -> bool:
    """Whether `$NO_PROXY` names the server, or a network of it."""
    own_names = (server.hostname or "", server.netloc.lower())
    for entry in proxies.get("no", "").split(","):
        each = entry.strip().lower()
        name = each.removeprefix("*").lstrip(".")  # as for Go, `*.example` is `.example`
        if each == "*" or (name and any(f".{own}".endswith(f".{name}") for own in own_names)):
            return True
        with contextlib.suppress(ValueError):  # a name, which no network contains
            if ip_address(server.hostname or "") in ip_network(each, strict=False):
                return True
    return False


def _check_encrypted(connection: Connection) -> None:
    """Raises: DataError if credentials would reach another machine without TLS."""
    url = urlsplit(connection.server)
    if connection.credentials.authorization is None or url.scheme == "https":
        return
    if _is_here(url.hostname or "") and connection.proxy is None:
        return
    raise DataError(
        f"{connection.server}: credentials would be sent without TLS. Name the server with "
        "https://, or choose a user without credentials"
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

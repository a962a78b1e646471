"""Test that requests and commands in pods reach an API server in the same way.

- Both verify the server by the authority and name of the kubeconfig and present the user's
  certificate.
- Both go through the tunnel of a proxy, of the kubeconfig or the environment, with the user and
  password of its URL.

Left out: SOCKS proxies, which need another package; which proxy serves which server, and
credentials without TLS (test_connection_credentials).
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from dlion_api.errors import UnavailableError
from dlion_cli.cluster.client import connect
from dlion_cli.cluster.connection_settings import ConnectionSettings
from scripted_servers import ServedTls, Server, served
from self_signed import self_signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlion_cli.cluster.client import ClusterClient

NONE = (200, json.dumps({}))
CALLS: dict[str, Callable[[ClusterClient], object]] = {
    "request": lambda client: client.get("/version"),
    "command": lambda client: list(client.exec_command("k", "keeper", ["python", "-c", "pass"])),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Return a server of another name than its address, which demands a certificate."""
    adm = self_signed(tmp_path, "adm")
    chain = self_signed(tmp_path, "server", host="api.example")
    return Server(
        {"version": NONE},
        kept=tmp_path,
        tls=ServedTls(chain, chain, clients=adm),
        user={"client-certificate": adm.name, "client-key": adm.name},
    )


@pytest.fixture
def file(server: Server, tmp_path: Path) -> Iterator[str]:
    with served(tmp_path / "config", {"here": server}) as path:
        yield path


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Return a proxy's address, and the servers and users of its tunnels. All lead to this
    machine."""
    tunnels: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            host, _, port = self.path.rpartition(":")
            tunnels.append((host, self.headers.get("Proxy-Authorization", "")))
            with socket.create_connection(("127.0.0.1", int(port))) as far:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=copied, args=(far, self.connection))
                back.start()
                copied(self.connection, far)
                back.join()
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{listening.server_address[1]}", tunnels
        listening.shutdown()
        thread.join()


def copied(source: socket.socket, target: socket.socket) -> None:
    """Copy what one end of a tunnel sends until it closes."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@each_call
def test_the_kubeconfigs_tls_applies(
    server: Server, file: str, call: Callable[[ClusterClient], object]
) -> None:
    for name, is_reached in (("api.example", True), ("other.example", False), (None, False)):
        settings = ConnectionSettings(kubeconfig=file, tls_server_name=name)
        with contextlib.closing(connect(settings)) as client:
            if is_reached:
                call(client)
                continue
            with pytest.raises(UnavailableError, match="its certificate is for other names"):
                call(client)
    assert len(server.headers) == 1


@each_call
def test_an_intermediate_authority_is_trusted(
    tmp_path: Path, call: Callable[[ClusterClient], object]
) -> None:
    """As by Go. Its own authority is not in the kubeconfig, and nothing has key identifiers."""
    root = self_signed(tmp_path, "root")
    between = self_signed(tmp_path, "between", issuer=root)
    chain = self_signed(tmp_path, "server", issuer=between)
    server = Server({"version": NONE}, kept=tmp_path, tls=ServedTls(chain, between))
    with (
        served(tmp_path / "config", {"here": server}) as file,
        contextlib.closing(connect(ConnectionSettings(kubeconfig=file))) as client,
    ):
        call(client)


@each_call
@pytest.mark.parametrize("host", ["api.example", "[2001:db8::1]"])
@pytest.mark.parametrize("place", ["kubeconfig", "environment"])
def test_a_proxy_opens_a_tunnel(
    server: Server,
    file: str,
    proxy: tuple[str, list[tuple[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    host: str,
    call: Callable[[ClusterClient], object],
) -> None:
    (address, tunnels), user = proxy, ""
    document = yaml.safe_load(Path(file).read_text())
    cluster = document["clusters"][0]["cluster"]
    cluster |= {
        "server": cluster["server"].replace("127.0.0.1", host),
        "tls-server-name": "api.example",
    }
    if place == "environment":
        monkeypatch.setenv("HTTPS_PROXY", address)
    else:
        cluster["proxy-url"] = f"http://us%40er:pass%3Aword@{address}"
        user = f"Basic {base64.b64encode(b'us@er:pass:word').decode()}"
    Path(file).write_text(yaml.safe_dump(document))
    with contextlib.closing(connect(ConnectionSettings(kubeconfig=file))) as client:
        call(client)
    assert tunnels == [(host, user)]
    assert len(server.headers) == 1

"""Test which servers get the credentials of a connection, and the user of a kubeconfig.

- Credentials follow no redirect, and reach another machine only over TLS.
- The user of a kubeconfig acts as the one of `as`, with its groups, also for commands in pods,
  unless `--as` names another. Values that no header can hold are refused.
- Relative paths of a user's certificate start at its own file. An empty file counts as missing.
- A server gets the user's certificate, password or token; without them, what a plugin prints. A
  token's file is read again and comes before another token. A pod uses its service account.
- A plugin renews its token once for all threads, and after a refusal. If it fails, its words are
  the error, or stand before it at a terminal, where it may ask. It renews an expired certificate
  within one command, which stays in no file.
- A proxy comes from the kubeconfig, or for servers that $NO_PROXY does not name from the
  environment. That of the environment serves no address of this machine.
- Of credentials and authorities that are given twice, none is chosen: as for kubectl, it is an
  error.
- A value of another type, and the URL of a proxy that cannot be used, are errors of the file.

Left out: kubectl's options (test_connection_flags), a real API server (tests/cluster).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cryptography import x509

from dlion_api.errors import DataError, DeniedError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.cluster import kubeconfig
from dlion_cli.cluster.client import ClusterClient, connect
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.cluster.connections import Connection
from dlion_cli.cluster.credentials import UserCredentials
from scripted_servers import ServedTls, Server, served, server_url
from self_signed import self_signed

NONE = (200, json.dumps({"items": [], "metadata": {}}))
SECRET = "s3cr3t-t0ken"
OLD = "t0ken-of-the-file"


def test_a_redirect_of_a_command_in_a_pod_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    other = Server({}, kept=tmp_path)
    with (
        served(tmp_path / "other", {"other": other}) as file,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        there = server_url(file, "other").replace("http", "ws", 1) + "/steal/exec"

        def redirect() -> None:
            near, _ = listener.accept()
            with near:
                near.recv(65536)
                near.sendall(f"HTTP/1.1 302 Found\r\nLocation: {there}\r\n\r\n".encode())

        thread = threading.Thread(target=redirect)
        thread.start()
        settings = ConnectionSettings(
            server=f"http://127.0.0.1:{listener.getsockname()[1]}", token=SECRET
        )
        with (
            contextlib.closing(connect(settings)) as client,
            pytest.raises(UnavailableError, match="it redirects to another server"),
        ):
            list(client.exec_command("k", "keeper", ["python"]))
        thread.join()
    assert other.headers == []


@pytest.mark.parametrize("host", ["plant-a.example:8080", "10.0.0.1", "[2001:db8::1]:80"])
def test_credentials_are_sent_to_another_machine_only_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(DataError, match="would be sent without TLS") as raised:
        connect(ConnectionSettings(server=f"http://{host}", token=SECRET))
    assert SECRET not in str(raised.value)
    for server in (f"https://{host}", "http://localhost:8080", "http://[::1]:80"):
        connect(ConnectionSettings(server=server, token=SECRET)).close()
    connect(ConnectionSettings(server=f"http://{host}")).close()  # no credentials
    with served(tmp_path / "config", {"here": Server({}, user={"token": OLD})}) as file:
        text = Path(file).read_text().replace(server_url(file, "here"), f"http://{host}")
        Path(file).write_text(text)
        with pytest.raises(DataError, match="would be sent without TLS"):
            connect(ConnectionSettings(kubeconfig=file))


def test_no_proxy_gets_credentials_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, here = Server({"dlionjobs": NONE}), Server({"dlionjobs": NONE}, user={"token": OLD})
    with served(tmp_path / "config", {"here": here, "proxy": proxy}) as file:
        url = server_url(file, "proxy")
        monkeypatch.setenv("HTTP_PROXY", url)
        assert main(["get", "--kubeconfig", file]) == 0
        document = yaml.safe_load(Path(file).read_text())
        document["clusters"][0]["cluster"]["proxy-url"] = url
        Path(file).write_text(yaml.safe_dump(document))
        with pytest.raises(DataError, match="would be sent without TLS"):
            connect(ConnectionSettings(kubeconfig=file))
    assert (len(here.headers), proxy.headers) == (1, [])


ACTS_AS = {
    "as": "jane",
    "as-uid": "7",
    "as-groups": ["dev", "ops"],
    "as-user-extra": {"acme.com/Project%": ["p", "q"]},
}


def test_the_kubeconfigs_user_acts_as_another(tmp_path: Path) -> None:
    server = Server({"dlionjobs": NONE}, kept=tmp_path, user={"token": OLD, **ACTS_AS})
    with served(tmp_path / "config", {"here": server}) as file:
        assert main(["get", "--kubeconfig", file]) == 0
        assert main(["get", "--kubeconfig", file, "--token", SECRET]) == 0
        with contextlib.closing(connect(ConnectionSettings(kubeconfig=file))) as client:
            list(client.exec_command("k", "keeper", ["python", "-c", "pass"]))
        assert main(["get", "--kubeconfig", file, "--as", "joe"]) == 0
    *all_of_file, replaced = server.headers
    for headers in all_of_file:
        assert headers.get_all("Impersonate-User") == ["jane"]
        assert headers.get_all("Impersonate-Uid") == ["7"]
        assert headers.get_all("Impersonate-Group") == ["dev", "ops"]
        assert headers.get_all("Impersonate-Extra-acme.com%2FProject%25") == ["p", "q"]
    assert len(all_of_file) == 3
    given = [(name, value) for name, value in replaced.items() if name.startswith("Impersonate")]
    assert given == [("Impersonate-User", "joe")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"as-groups": ["dev"]}, "need as: NAME"),
        ({"as": 7}, "no text in ASCII"),
        ({"as": "jane\nX-Admin: 1"}, "no text in ASCII"),
        ({"as": "jane", "as-groups": "dev"}, "no text in ASCII"),
        ({"as": "jane", "as-groups": [{}]}, "no text in ASCII"),
        ({"as": "jane", "as-user-extra": ["a"]}, "no text in ASCII"),
        ({"as": "jane", "as-user-extra": {"a": "b"}}, "no text in ASCII"),
    ],
)
def test_wrong_impersonation_of_the_kubeconfig_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with (
        served(tmp_path / "config", {"here": Server({}, user=given)}) as file,
        pytest.raises(DataError, match=message),
    ):
        connect(ConnectionSettings(kubeconfig=file))


@pytest.mark.parametrize("options", [{"user": "adm"}, {"user": "adm", "cluster": "c"}])
def test_a_certificates_path_is_relative_to_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    (tmp_path / "users").mkdir()
    (tmp_path / "clusters").mkdir()
    certificate = self_signed(tmp_path / "users", "adm")
    pem = {"client-certificate": certificate.name, "client-key": certificate.name}
    users = {"users": [{"name": "adm", "user": pem}]}
    clusters = {"clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9"}}]}
    (tmp_path / "users/config").write_text(yaml.safe_dump(users))
    (tmp_path / "clusters/config").write_text(yaml.safe_dump(clusters))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "clusters/config:users/config")
    server = None if "cluster" in options else "https://127.0.0.1:9"
    with contextlib.closing(connect(ConnectionSettings(server=server, **options))) as client:
        assert client.client_certificate() == certificate.read_bytes()


def test_an_empty_kubeconfig_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server({"dlionjobs": NONE})
    with served(tmp_path / "config", {"here": server}) as file:
        url = server_url(file, "here")
        (tmp_path / "empty").write_text("# nothing\n")
        empty = str(tmp_path / "empty")
        assert main(["get", "--kubeconfig", empty, "-s", url, "--token", SECRET]) == 0
        monkeypatch.setenv("KUBECONFIG", f"{empty}:{file}")
        assert main(["get"]) == 0
        with pytest.raises(DataError, match=r"nothing in the kubeconfig .*empty\. Name one"):
            connect(ConnectionSettings(kubeconfig=empty))
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


def encoded(path: Path) -> str:
    """Return what a kubeconfig has instead of that file."""
    return base64.b64encode(path.read_bytes()).decode()


def test_a_servers_demand_for_a_certificate_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, adm = self_signed(tmp_path, "server"), self_signed(tmp_path, "adm")
    stranger = self_signed(tmp_path, "stranger")
    for pem, code in (
        ({"client-certificate": adm.name, "client-key": adm.name}, 0),
        ({"client-certificate-data": encoded(adm), "client-key-data": encoded(adm)}, 0),
        ({"client-certificate": adm.name, "client-key": stranger.name}, ExitCode.DATA),
        ({"client-certificate": stranger.name, "client-key": stranger.name}, ExitCode.UNAVAILABLE),
        ({"token": SECRET}, ExitCode.UNAVAILABLE),
    ):
        server = Server({"dlionjobs": NONE}, tls=ServedTls(chain, chain, clients=adm), user=pem)
        with served(tmp_path / "config", {"here": server}) as file:
            assert main(["get", "--kubeconfig", file]) == code, pem
    assert "cannot be used" in capsys.readouterr().err


def test_an_authority_without_certificates_is_not_replaced(tmp_path: Path) -> None:
    """The system's authorities would be trusted instead."""
    (tmp_path / "empty").touch()
    tls = ServedTls(self_signed(tmp_path, "server"), tmp_path / "empty")
    with (
        served(tmp_path / "config", {"here": Server({}, tls=tls)}) as file,
        pytest.raises(DataError, match="cannot be used"),
    ):
        connect(ConnectionSettings(kubeconfig=file))


def test_verification_is_not_turned_off_beside_an_authority(tmp_path: Path) -> None:
    chain = self_signed(tmp_path, "server")
    server = Server({"dlionjobs": NONE}, tls=ServedTls(chain, chain))
    with served(tmp_path / "config", {"here": server}) as file:
        document = yaml.safe_load(Path(file).read_text())
        document["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
        Path(file).write_text(yaml.safe_dump(document))
        with pytest.raises(DataError, match="excludes a certificate authority"):
            connect(ConnectionSettings(kubeconfig=file))
        assert main(["get", "--kubeconfig", file, "--insecure-skip-tls-verify"]) == 0


@contextlib.contextmanager
def connected(path: Path, server: Server) -> Iterator[ClusterClient]:
    """Yield a client of that server, whose kubeconfig is written to `path`."""
    with (
        served(path, {"here": server}) as file,
        contextlib.closing(connect(ConnectionSettings(kubeconfig=file))) as client,
    ):
        yield client


def test_the_file_of_a_token_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{OLD}\n")
    server = Server({"version": NONE}, user={"tokenFile": "token"})
    with connected(tmp_path / "config", server) as client:
        client.get("/version")
        (tmp_path / "token").write_text(SECRET)
        client.get("/version")
        assert client.bearer_token() == SECRET
        (tmp_path / "token").unlink()
        with pytest.raises(DataError, match="token: cannot be read"):
            client.get("/version")
    sent = [headers["Authorization"] for headers in server.headers]
    assert sent == [f"Bearer {OLD}", f"Bearer {SECRET}"]


def test_a_password_without_a_name_is_left_beside_the_file_of_a_token(tmp_path: Path) -> None:
    """As by kubectl, which refuses it beside `token`."""
    (tmp_path / "token").write_text(SECRET)
    server = Server({"version": NONE}, user={"tokenFile": "token", "password": "pw"})
    with connected(tmp_path / "config", server) as client:
        client.get("/version")
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_token_is_sent_while_its_file_has_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    server = Server({"version": NONE}, user={"token": OLD, "tokenFile": "token"})
    config = tmp_path / "config"
    with connected(config, server) as client:
        client.get("/version")
        (tmp_path / "token").write_text(SECRET)
        client.get("/version")
        document = yaml.safe_load(config.read_text())
        del document["users"][0]["user"]["token"]
        config.write_text(yaml.safe_dump(document))
        (tmp_path / "token").write_text("")
        with (
            contextlib.closing(connect(ConnectionSettings(kubeconfig=str(config)))) as client,
            pytest.raises(DataError, match="token: cannot be read: it is empty"),
        ):
            client.get("/version")
    sent = [headers["Authorization"] for headers in server.headers]
    assert sent == [f"Bearer {OLD}", f"Bearer {SECRET}"]


@pytest.mark.parametrize(
    ("user", "sent"),
    [
        ({"username": "jane", "password": "pw"}, "Basic amFuZTpwdw=="),
        ({"username": "jane"}, "Basic amFuZTo="),
        ({"username": "jane", "password": None}, "Basic amFuZTo="),
        ({"username": "", "password": ""}, None),
        ({"username": None, "password": None}, None),
    ],
)
def test_a_password_is_sent(tmp_path: Path, user: dict[str, str | None], sent: str | None) -> None:
    server = Server({"dlionjobs": NONE}, user=user)
    with served(tmp_path / "config", {"here": server}) as file:
        assert main(["get", "--kubeconfig", file]) == 0
    assert server.headers[0]["Authorization"] == sent


VERSION = "client.authentication.k8s.io/v1"


def test_a_plugin_provides_the_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / "plugin"
    credential = {"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": SECRET}}
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")
    plugin.chmod(0o700)
    command = {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}
    server = Server({"dlionjobs": NONE}, user={"exec": command})
    with served(tmp_path / "config", {"here": server}) as file:
        assert main(["get", "--kubeconfig", file]) == 0
        plugin.write_text("#!/bin/sh\necho 'log in first' >&2\nexit 3\n")
        assert main(["get", "--kubeconfig", file]) == ExitCode.DATA
        assert "exec: process returned 3. log in first" in capsys.readouterr().err
    assert [headers["Authorization"] for headers in server.headers] == [f"Bearer {SECRET}"]


def test_a_plugin_gets_the_fields_of_its_user_and_cluster(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    credential = {"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": SECRET}}
    words = 'echo "$1 $NAME $KUBERNETES_EXEC_INFO"'
    plugin.write_text(f"#!/bin/sh\n{words} > {tmp_path}/got\necho '{json.dumps(credential)}'\n")
    plugin.chmod(0o700)
    command = {
        "apiVersion": VERSION,
        "command": "./plugin",
        "args": ["login"],
        "env": [{"name": "NAME", "value": "jane"}],
        "provideClusterInfo": True,
    }
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a"}}
    with served(tmp_path / "config", {"here": Server({}, user={"exec": command})}) as file:
        document = yaml.safe_load(Path(file).read_text())
        document["clusters"][0]["cluster"]["extensions"] = [{"name": "x"}, extension]
        Path(file).write_text(yaml.safe_dump(document))
        connect(ConnectionSettings(kubeconfig=file)).close()
        argument, name, text = (tmp_path / "got").read_text().split(" ", 2)
        info = json.loads(text)
        assert (argument, name, info["kind"]) == ("login", "jane", "ExecCredential")
        assert info["spec"]["interactive"] is False
        assert info["spec"]["cluster"]["server"] == server_url(file, "here")
        assert info["spec"]["cluster"]["config"] == {"audience": "a"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"command": "true", "interactiveMode": "Always"}, "standard input is no terminal"),
        ({"command": "no-such-plugin", "installHint": "Get it: x"}, "no-such-plugin.*Get it: x"),
        ({"command": "no-such-plugin"}, "no-such-plugin.*Install it"),
    ],
)
def test_a_plugin_that_cannot_run_is_named_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    user = {"exec": {"apiVersion": VERSION, **given}}
    with (
        served(tmp_path / "config", {"here": Server({}, user=user)}) as file,
        Path(os.devnull).open() as nothing,
    ):
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(DataError, match=message):
            connect(ConnectionSettings(kubeconfig=file))


@contextlib.contextmanager
def at_a_terminal(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[Any]:
    """Within it, these streams of the process are a terminal; yield its screen."""
    near, far = os.openpty()
    with os.fdopen(near, "rb", buffering=0) as screen, os.fdopen(far, "w") as terminal:
        for name in names:
            monkeypatch.setattr(sys, name, terminal)
        yield screen
        monkeypatch.undo()


@pytest.mark.parametrize("line", ["echo 'log in first' >&2; exit 3", "echo 7", "echo '{answer}'"])
def test_a_plugin_without_credentials_is_named_at_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    answer = json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": None})
    line = line.replace("{answer}", answer)
    command = {"apiVersion": VERSION, "command": "sh", "args": ["-c", line]}
    server = Server({}, user={"exec": command})
    with (
        served(tmp_path / "config", {"here": server}) as file,
        at_a_terminal(monkeypatch, "stdin", "stdout", "stderr") as screen,
    ):
        with pytest.raises(DataError, match=r"exec: (process returned 3|the plugin printed no)"):
            connect(ConnectionSettings(kubeconfig=file))
        if "log in" in line:
            assert b"log in first" in screen.read(100)


def test_a_plugin_asks_at_the_terminal_whose_command_writes_to_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "plugin"
    credential = {"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": SECRET}}
    plugin.write_text(
        f"#!/bin/sh\ntest -t 0 && echo 'open the page' >&2\necho '{json.dumps(credential)}'\n"
    )
    plugin.chmod(0o700)
    command = {"apiVersion": VERSION, "command": "./plugin"}
    server = Server({}, user={"exec": command})
    with (
        served(tmp_path / "config", {"here": server}) as file,
        at_a_terminal(monkeypatch, "stdin", "stderr") as screen,
    ):
        connect(ConnectionSettings(kubeconfig=file)).close()
        print(".", file=sys.stderr, flush=True)
        assert screen.read(100).startswith(b"open the page")


def test_credentials_are_renewed_once_for_all_threads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin, ends = tmp_path / "plugin", "2000-01-01T00:00:00Z"
    command = {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}
    server = Server({"version": NONE}, user={"exec": command})

    def answer(token: str, end: str) -> None:
        status = {"token": token, "expirationTimestamp": end}
        text = json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status})
        plugin.write_text(f"#!/bin/sh\necho >> {tmp_path}/runs\nsleep 0.2\necho '{text}'\n")

    answer(OLD, ends)
    plugin.chmod(0o700)
    with connected(tmp_path / "config", server) as client:
        plugin.write_text("#!/bin/sh\necho 'log in first' >&2\nexit 3\n")
        with pytest.raises(UnavailableError, match=r"renewed: exec: process returned 3\. log in"):
            client.get("/version")
        answer(SECRET, "2999-01-01T00:00:00Z")
        threads = [threading.Thread(target=client.get, args=("/version",)) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [each["Authorization"] for each in server.headers] == [f"Bearer {SECRET}"] * 4
    assert len((tmp_path / "runs").read_text()) == 2, "to connect, and to renew"
    assert capfd.readouterr().err == ""


def test_a_plugin_runs_again_after_a_refusal(tmp_path: Path) -> None:
    """As for kubectl, for the next request: its token may have ended without a known time."""
    plugin = tmp_path / "plugin"
    command = {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}
    refusal = 401, json.dumps({"message": "Unauthorized", "reason": "Unauthorized"})
    server = Server({"version": refusal, "healthz": NONE}, user={"exec": command})

    def answer(token: str) -> None:
        credential = {"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": token}}
        plugin.write_text(f"#!/bin/sh\necho '{json.dumps(credential)}'\n")

    answer(OLD)
    plugin.chmod(0o700)
    with connected(tmp_path / "config", server) as client:
        answer(SECRET)
        client.get("/healthz")
        for _ in range(2):
            with pytest.raises(DeniedError):
                client.get("/version")
    sent = [each["Authorization"] for each in server.headers]
    assert sent == [f"Bearer {OLD}", f"Bearer {OLD}", f"Bearer {SECRET}"]


def test_an_expired_certificate_of_a_plugin_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, plugin = tmp_path / "tmp", tmp_path / "plugin"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    chain, old, adm = (self_signed(tmp_path, name) for name in ("server", "old", "adm"))
    both = tmp_path / "clients.pem"
    both.write_bytes(old.read_bytes() + adm.read_bytes())

    def answer(pem: Path, end: str, **other: str) -> None:
        status = {"clientCertificateData": pem.read_text(), "clientKeyData": pem.read_text()}
        status |= {"expirationTimestamp": end, **other}
        text = json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": status})
        plugin.write_text(f"#!/bin/sh\ncat << 'EOF'\n{text}\nEOF\n")

    answer(old, "2000-01-01T00:00:00Z")
    plugin.chmod(0o700)
    command = {"apiVersion": VERSION, "command": "./plugin", "interactiveMode": "Never"}
    tls = ServedTls(chain, chain, clients=both)
    server = Server({"version": NONE}, tls=tls, user={"exec": command})
    with connected(tmp_path / "config", server) as client:
        client.get("/version")
        answer(adm, "2999-01-01T00:00:00.123456789Z", token=SECRET)
        client.get("/version")
        assert list(temporary.iterdir()) == []
    presented = [x509.load_der_x509_certificate(der).subject for der in server.certificates]
    assert presented == [
        x509.load_pem_x509_certificate(pem.read_bytes()).subject for pem in (old, adm)
    ]
    assert [each["Authorization"] for each in server.headers] == [None, f"Bearer {SECRET}"]


def test_no_plugin_runs_for_a_user_with_other_credentials(tmp_path: Path) -> None:
    adm = self_signed(tmp_path, "adm")
    command = {"apiVersion": VERSION, "command": "/nowhere/plugin", "interactiveMode": "Never"}
    for other in (
        {"token": OLD},
        {"username": "jane", "password": "pw"},
        {"client-certificate": adm.name, "client-key": adm.name},
    ):
        server = Server({"dlionjobs": NONE}, user={"exec": command, **other})
        with served(tmp_path / "config", {"here": server}) as file:
            assert main(["get", "--kubeconfig", file]) == 0


def test_a_pod_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = self_signed(tmp_path, "server")
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "ca.crt").write_bytes(chain.read_bytes())
    monkeypatch.setattr(kubeconfig, "_SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    server = Server({"dlionjobs": NONE}, tls=ServedTls(chain, chain))
    with served(tmp_path / "config", {"here": server}) as file:
        address = urlsplit(server_url(file, "here"))
        monkeypatch.setenv("KUBECONFIG", "/nowhere")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
        assert main(["get", "-n", "farm"]) == 0
        (tmp_path / "namespace").write_text("ml")
        with contextlib.closing(connect(ConnectionSettings())) as client:
            assert client.namespace == "ml"
        with pytest.raises(DataError, match=r"pod has no kubeconfig: .* need --server"):
            connect(ConnectionSettings(token=OLD))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "tcp://10.0.0.1:443")
        with pytest.raises(DataError, match="KUBERNETES_SERVICE_PORT is 'tcp:"):
            connect(ConnectionSettings())
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


FAR = "https://api.example:6443"
SET, OTHER = "http://proxy.example:3128", "http://other.example:3128"


@pytest.mark.parametrize(
    ("cluster", "environment", "proxy"),
    [
        ({"server": FAR}, {}, None),
        ({"server": FAR}, {"HTTPS_PROXY": SET, "HTTP_PROXY": OTHER}, SET),
        ({"server": "http://api.example"}, {"HTTPS_PROXY": OTHER, "http_proxy": SET}, SET),
        ({"server": FAR}, {"HTTPS_PROXY": "proxy.example:3128"}, SET),
        ({"server": FAR}, {"ALL_PROXY": OTHER, "HTTP_PROXY": OTHER}, None),
        ({"server": FAR}, {"HTTPS_PROXY": SET, "NO_PROXY": "10.0.0.0/8,.other.example"}, SET),
        ({"server": FAR}, {"HTTPS_PROXY": OTHER, "NO_PROXY": "10.0.0.0/8, .example"}, None),
        ({"server": FAR}, {"HTTPS_PROXY": OTHER, "NO_PROXY": "localhost, *.example"}, None),
        ({"server": FAR}, {"HTTPS_PROXY": SET, "NO_PROXY": "*.other.example"}, SET),
        ({"server": FAR}, {"HTTPS_PROXY": OTHER, "NO_PROXY": "localhost,*"}, None),
        ({"server": "https://10.1.2.3:6443"}, {"HTTPS_PROXY": OTHER, "NO_PROXY": "::/0,10.0.0.0/8"},
         None),
        ({"server": "https://[2001:db8::1]"}, {"HTTPS_PROXY": OTHER, "NO_PROXY": "2001:db8::/32"},
         None),
        ({"server": "https://localhost:6443"}, {"HTTPS_PROXY": OTHER}, None),
        ({"server": "https://[::1]:6443"}, {"HTTPS_PROXY": OTHER}, None),
        ({"server": FAR, "proxy-url": SET}, {"HTTPS_PROXY": OTHER, "NO_PROXY": "*"}, SET),
        ({"server": "https://127.0.0.1:6443", "proxy-url": SET}, {}, SET),
    ],
)  # fmt: skip
def test_a_proxy_is_chosen_as_by_kubectl(
    monkeypatch: pytest.MonkeyPatch,
    cluster: dict[str, str],
    environment: dict[str, str],
    proxy: str | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Connection(cluster, UserCredentials()).proxy == proxy


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("proxy-url", "proxy.example:3128", "(?i)proxy"),
        ("proxy-url", "http://us:pw@[::1", "used: Invalid IPv6 URL$"),
        ("proxy-url", 3128, "cannot be used"),
        ("server", 8443, "cannot be used"),
        ("server", "127.0.0.1:8443", "is not a URL of a server: write https://HOST:PORT"),
        ("tokenFile", 5, "cannot be used"),
        ("contexts", 1, "there is no context 'here'; it has: none"),
    ],
)
def test_a_value_that_cannot_be_used_is_an_error_of_the_kubeconfig(
    tmp_path: Path, place: str, value: object, message: str
) -> None:
    cluster: dict[str, object] = {"server": "https://127.0.0.1:9"}
    user: dict[str, object] = {}
    document: dict[str, object] = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    {"contexts": document, "tokenFile": user}.get(place, cluster)[place] = value
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(DataError, match=message):
        connect(ConnectionSettings(kubeconfig=str(file)))


PEM = {"client-certificate": "adm.pem", "client-key": "adm.pem"}
DATA = {"client-certificate-data": "YQ==", "client-key-data": "YQ=="}
PLUGIN = {"apiVersion": VERSION, "command": "/nowhere/plugin", "interactiveMode": "Never"}


@pytest.mark.parametrize(
    ("user", "cluster", "message"),
    [
        ({"token": OLD, "username": "jane", "password": "pw"}, {}, "a token and a password"),
        ({"tokenFile": "adm.pem", "username": "jane"}, {}, "a token and a password"),
        ({"token": OLD, "password": "pw"}, {}, "a token and a password"),
        ({"exec": PLUGIN, "auth-provider": {"name": "oidc"}}, {}, "exec and auth-provider"),
        ({**PEM, "client-key-data": "YQ=="}, {}, "both client-key and client-key-data"),
        ({**DATA, "client-certificate": "adm.pem"}, {}, "both client-certificate and"),
        ({"client-certificate": "adm.pem"}, {}, "needs a client-key"),
        ({"username": "jane:doe", "password": "pw"}, {}, "username contains a colon"),
        ({}, {"certificate-authority": "adm.pem", "certificate-authority-data": "YQ=="},
         "both certificate-authority and"),
    ],
)  # fmt: skip
def test_ambiguous_credentials_are_refused(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, str], message: str
) -> None:
    self_signed(tmp_path, "adm")
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "jane"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:9", **cluster}}],
        "users": [{"name": "jane", "user": user}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(document))
    with pytest.raises(DataError, match=message):
        connect(ConnectionSettings(kubeconfig=str(tmp_path / "config")))


@pytest.mark.filterwarnings("ignore:SOCKS support")
def test_a_proxy_that_needs_another_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "socks", None)
    monkeypatch.delitem(sys.modules, "urllib3.contrib.socks", raising=False)
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c"}}],
        "clusters": [
            {
                "name": "c",
                "cluster": {"server": "https://127.0.0.1:9", "proxy-url": "socks5://127.0.0.1:1"},
            }
        ],
    }
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(DataError, match=r"SOCKS proxy needs .* pip install PySocks"):
        connect(ConnectionSettings(kubeconfig=str(file)))

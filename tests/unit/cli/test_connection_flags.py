"""Test kubectl's connection options: server, verification, user and time limit.

- Each option is read before and after the command, and reaches the server, also for commands in
  pods.
- A cluster, server or token of the command line replaces that of the kubeconfig. A named server
  needs no kubeconfig.
- Names that the kubeconfig lacks, and invalid durations, URLs and combinations, are refused with
  the correct form. Refused impersonation is reported. No token is printed.

Left out: the kubeconfig itself (test_connection_credentials); a real API server
(tests/cluster/test_cli.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
import yaml

from dlion_api.errors import DataError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.cluster.client import connect
from dlion_cli.cluster.connection_flags import complete_contexts, connection_flags
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.commands.cluster.get import get
from dlion_cli.pod_streams.log_lines import LogSource, read_lines
from scripted_servers import ServedTls, Server, served, server_url
from self_signed import self_signed

if TYPE_CHECKING:
    from collections.abc import Iterator

NONE = (200, json.dumps({"items": [], "metadata": {}}))
SECRET = "s3cr3t-t0ken"
OLD = "t0ken-of-the-file"
Servers = dict[str, Server]


def empty() -> Server:
    return Server({"dlionjobs": NONE}, user={"token": OLD})


@pytest.fixture
def servers() -> Servers:
    return {"plant-a": empty(), "plant-b": empty()}


@pytest.fixture
def file(servers: Servers, tmp_path: Path) -> Iterator[str]:
    """Return a kubeconfig with a context, a cluster and a user for each of the servers."""
    with served(tmp_path / "config", servers) as path:
        yield path


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    ("options", "reached", "token", "others"),
    [
        (["--cluster", "plant-b"], "plant-b", OLD, {}),
        (["--user=plant-b"], "plant-a", OLD, {}),
        (["--token", SECRET], "plant-a", SECRET, {}),
        (["--as", "jane"], "plant-a", OLD, {"Impersonate-User": ["jane"]}),
        (["--as=jane", "--as-group", "dev", "--as-group=ops"], "plant-a", OLD,
         {"Impersonate-User": ["jane"], "Impersonate-Group": ["dev", "ops"]}),
        (["--request-timeout", "1m30s", "--insecure-skip-tls-verify"], "plant-a", OLD, {}),
    ],
)  # fmt: skip
def test_each_option_is_read_before_and_after_the_command(
    servers: Servers, file: str, before: bool, options: list[str], reached: str, token: str,
    others: dict[str, list[str]],
) -> None:  # fmt: skip
    usual = ["--kubeconfig", file]
    words = [*options, *usual, "get"] if before else ["get", *options, *usual]
    assert main(words) == 0
    assert [name for name, server in servers.items() if server.asked] == [reached]
    (headers,) = servers[reached].headers
    assert headers.get_all("Authorization") == [f"Bearer {token}"]
    for name in ("Impersonate-User", "Impersonate-Group"):
        assert headers.get_all(name) == others.get(name)


@pytest.mark.parametrize("option", ["--server", "-s"])
def test_a_server_replaces_the_clusters(servers: Servers, file: str, option: str) -> None:
    assert main(["get", option, f"{server_url(file, 'plant-b')}/", "--kubeconfig", file]) == 0
    assert (servers["plant-a"].asked, len(servers["plant-b"].asked)) == ([], 1)
    assert servers["plant-b"].headers[0]["Authorization"] == f"Bearer {OLD}"


def test_a_server_needs_no_kubeconfig(
    servers: Servers, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["get", "-s", server_url(file, "plant-b"), "--token", SECRET, "-n", "farm"]) == 0
    server = servers["plant-b"]
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert server.asked[0].endswith("/namespaces/farm/dlionjobs")
    with pytest.raises(DataError, match="no kubeconfig file at /nowhere"):
        connect(ConnectionSettings(server="http://127.0.0.1:9", user="jane"))


def test_a_pod_needs_a_server_for_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(DataError, match="need --server too"):
        connect(ConnectionSettings(token=SECRET))


def test_a_token_replaces_all_credentials_of_the_user(tmp_path: Path) -> None:
    """An API server prefers a client certificate to a token; a plugin would run."""
    server = Server({"dlionjobs": NONE}, user={"username": "jane", "password": "pw"})
    with served(tmp_path / "config", {"here": server}) as file:
        document = yaml.safe_load((tmp_path / "config").read_text())
        document["users"][0]["user"]["exec"] = {"command": "/nowhere/plugin"}
        (tmp_path / "config").write_text(yaml.safe_dump(document))
        assert main(["get", "--kubeconfig", file, "--token", SECRET]) == 0
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"


def test_a_command_in_a_pod_runs_as_the_same_user(tmp_path: Path) -> None:
    server = Server({}, kept=tmp_path, user={"token": OLD})
    with served(tmp_path / "config", {"here": server}) as file:
        groups = ("dev", "ops")
        settings = ConnectionSettings(
            kubeconfig=file, token=SECRET, impersonated_user="jane", impersonated_groups=groups
        )
        with contextlib.closing(connect(settings)) as client:
            assert list(client.exec_command("k", "keeper", ["python", "-c", "pass"])) == []
    (headers,) = server.headers
    assert headers.get_all("Authorization") == [f"Bearer {SECRET}"]
    assert headers.get_all("Impersonate-User") == ["jane"]
    assert headers.get_all("Impersonate-Group") == ["dev", "ops"]


def test_the_verification_of_a_certificate_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = self_signed(tmp_path, "server", host="api.example")
    other = self_signed(tmp_path, "other")
    server = Server({"dlionjobs": NONE}, tls=ServedTls(chain, other))
    named = ["--certificate-authority", str(chain), "--tls-server-name", "api.example"]
    with served(tmp_path / "config", {"here": server}) as file:
        for options, words in (
            (named[:2], "names"), (named[2:], "trusts"), ([], "trusts"),
            (["-s", server_url(file, "here"), *named[:2]], "names"),
        ):  # fmt: skip
            assert main(["get", *options, "--kubeconfig", file]) == ExitCode.UNAVAILABLE
            assert words in capsys.readouterr().err
        assert server.asked == []
        assert main(["get", *named, "--kubeconfig", file]) == 0
        assert main([*named, "get", "--kubeconfig", file, "-s", server_url(file, "here")]) == 0
        assert main(["get", "--insecure-skip-tls-verify", "--kubeconfig", file]) == 0
        in_capitals = server_url(file, "here").replace("https", "HTTPS")
        assert main(["get", "--kubeconfig", file, "-s", in_capitals, *named]) == 0
    assert len(server.asked) == 4
    assert "arning" not in capsys.readouterr().err


@pytest.mark.parametrize("given_s", [0.2, None])
def test_a_request_has_the_users_time_limit(tmp_path: Path, given_s: float | None) -> None:
    """A check keeps its own limit if it is shorter."""
    server = Server({}, silent={"version"})
    with served(tmp_path / "config", {"here": server}) as file:
        settings = ConnectionSettings(kubeconfig=file, request_timeout_s=given_s)
        with (
            contextlib.closing(connect(settings)) as client,
            pytest.raises(UnavailableError, match="no answer in time"),
        ):
            client.get("/version", timeout_s=60.0 if given_s else 0.2)


def test_the_users_limit_applies_to_texts_logs_and_commands(tmp_path: Path) -> None:
    server = Server({}, silent={"metrics", "log", "exec"})
    with served(tmp_path / "config", {"here": server}) as file:
        settings = ConnectionSettings(kubeconfig=file, request_timeout_s=0.2)
        with contextlib.closing(connect(settings)) as client:
            logged = LogSource("w-0", "trainer", "small-0")
            for read in (
                lambda: client.read_text("/metrics", max_bytes=9, within_s=60.0),
                lambda: list(read_lines(client, logged, tail=None)),
                lambda: list(client.exec_command("w-0", "trainer", ["true"])),
            ):
                began_s = time.monotonic()
                with pytest.raises(UnavailableError, match="no answer in time"):
                    read()
                assert time.monotonic() - began_s < 30


def test_a_slow_text_ends_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            near, _ = listener.accept()
            with near, contextlib.suppress(OSError):
                near.recv(65536)
                near.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(1000):
                    near.sendall(b"x")
                    time.sleep(0.01)

        thread = threading.Thread(target=drip)
        thread.start()
        settings = ConnectionSettings(server=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with (
            contextlib.closing(connect(settings)) as client,
            pytest.raises(UnavailableError, match=r"did not end within 9999 bytes and 1\.5 s"),
        ):
            client.read_text("/metrics", max_bytes=9999, within_s=1.5)
        thread.join()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "plant-c", "get"], "it has: plant-a, plant-b. Did you mean plant-"),
        (["--cluster", "plant-c", "get"], "there is no cluster 'plant-c'"),
        (["get", "--user", "qq"], "there is no user 'qq'; it has: plant-a, plant-b. Choose one"),
        (["get", "--context", "plant-A"], "Did you mean plant-a?"),
        (["get", "--certificate-authority", "{file}"], "has no certificate in PEM form"),
    ],
)  # fmt: skip
def test_a_name_that_the_files_lack_is_reported(
    file: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    given = [word.format(file=file) for word in words]
    assert main([*given, "--kubeconfig", file]) == ExitCode.DATA
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-timeout", "5 s", "get"], "'5 s' is not a duration: write 30s, 1m30s or 0"),
        (["get", "--request-timeout=-1"], "'-1' is not a duration"),
        (["get", "--request-timeout=9999999h"], "longer than 24h"),
        (["get", "--server", "plant-a:6443"], "write https://HOST:PORT"),
        (["get", "--server", "https://h:99999999"], "the URL is invalid"),
        (["get", "--server", f"https://jane:{SECRET}@h"], "the URL contains credentials"),
        (["get", "--server", f"https://h?access_token={SECRET}"], "more than a server and a path"),
        (["get", "--server", f"https://h#{SECRET}"], "more than a server and a path"),
        (["get", "-s", f"jane:{SECRET}@h"], "this value is not a URL of a server"),
        (["get", "-s", f"h:6443/?access_token={SECRET}"], "this value is not a URL of a server"),
        (["get", "--", f"--token={SECRET}"], "--token follows --"),
        (["get", "--", f"-s=https://jane:{SECRET}@h"], "-s follows --"),
        (["get", "--", f"-shttps://jane:{SECRET}@h"], "-s follows --"),
        (["get", "--token", f"{SECRET}\nX-Admin: 1"], "has a space or line break"),
        (["get", "--token="], "the value is empty"),
        (["get", "--as", "jäne"], "not ASCII"),
        (["get", "--as-group", "dev"], "--as-group needs --as"),
        (["get", "--certificate-authority", "/nowhere"], "does not exist"),
        (["get", "--token", SECRET, "--contexts", "a,b"], "--token is of one server"),
        (["--server", "https://h", "get", "--contexts", "a"], "--server is of one server"),
        (["preflight", "f", "--token", SECRET], "No such option"),
        (["--token", SECRET, "preflight", "f"], "preflight does not use --token"),
        (["preflight", "f", "--as", "jane"], "--as is of the sites' clusters: give --contexts"),
        (["-n", "x", "preflight", "f"], "--namespace is of the sites' clusters"),
        (["--context", "x", "trust", "verify", "f"], "trust verify does not use --context: remove"),
        (["--token", SECRET, "trust", "verify", "f"], "trust verify does not use --token"),
        (["--token", SECRET, "run", "f"], "run does not use a cluster: remove --token"),
        (["--insecure-skip-tls-verify", "validate", "f"], "remove --insecure-skip-tls-verify"),
    ],
)
def test_wrong_options_are_refused_and_no_token_is_printed(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert SECRET not in shown.err + shown.out


@pytest.mark.parametrize("options", [["--token", SECRET, "--as", "jane"], ["-n", "ml"]])
def test_doctor_checks_the_cluster_of_any_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr("dlion_cli.preflight_checks.software_checks.software_checks", list)
    monkeypatch.setattr("dlion_cli.preflight_checks.machine_checks.machine_checks", list)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["doctor", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"] == []
    assert main(["doctor", "-o", "json", *options]) == ExitCode.UNAVAILABLE
    assert "no kubeconfig file at /nowhere" in capsys.readouterr().out


def test_the_help_of_a_namespace_names_its_object(capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ("preflight", "The operators' namespace. Default: dlion"),
        ("doctor", "Namespace of jobs. Default: the context's."),
        ("get", "Namespace. Default: the context's."),
    ):
        assert main([command, "--help"]) == 0
        assert message in " ".join(capsys.readouterr().out.split())


def test_an_authority_and_no_verification_exclude_each_other(file: str) -> None:
    options = ["--certificate-authority", file, "--insecure-skip-tls-verify"]
    assert main(["get", *options]) == ExitCode.USAGE


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("users", "jane", "user 'joe' may not act as user 'jane' (--as, 403)"),
        ("groups", "dev", "may not act as group 'dev'"),
    ],
)
def test_refused_impersonation_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str, message: str
) -> None:
    refused = (
        f'{kind} "{name}" is forbidden: User "joe" cannot impersonate resource "{kind}" in API '
        'group "" at the cluster scope'
    )
    server = Server({"dlionjobs": (403, json.dumps({"message": refused}))})
    with served(tmp_path / "config", {"here": server}) as file:
        assert main(["get", "--as", "jane", "--kubeconfig", file]) == ExitCode.DENIED
    error = capsys.readouterr().err
    assert message in error
    assert "--verb=impersonate --resource=" in error


@pytest.mark.parametrize("output", ["table", "json"])
@pytest.mark.parametrize("command", [["get"], ["doctor"], ["describe", "x"], ["get", "--help"]])
def test_a_token_is_printed_nowhere(
    file: str, capsys: pytest.CaptureFixture[str], output: str, command: list[str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("dlion_cli.preflight_checks.software_checks.software_checks", list)
    monkeypatch.setattr("dlion_cli.preflight_checks.machine_checks.machine_checks", list)
    caplog.set_level("DEBUG")
    main(["--token", SECRET, *command, "-o", output, "--kubeconfig", file])
    shown = capsys.readouterr()
    assert shown.out + shown.err
    assert SECRET not in shown.out + shown.err + caplog.text
    assert SECRET not in repr(ConnectionSettings(token=SECRET))


def test_an_invalid_token_of_the_file_is_not_printed(tmp_path: Path) -> None:
    server = Server({}, user={"token": f"{SECRET}\nx"})
    with (
        served(tmp_path / "config", {"here": server}) as file,
        contextlib.closing(connect(ConnectionSettings(kubeconfig=file))) as client,
        pytest.raises(DataError, match="take a new kubeconfig") as raised,
    ):
        client.get("/version")
    assert SECRET not in str(raised.value)


def test_several_contexts_share_the_options_that_name_no_server(
    servers: Servers, file: str
) -> None:
    words = ["--as", "jane", "get", "--contexts", "plant-a,plant-b", "--user", "plant-b"]
    assert main([*words, "--kubeconfig", file]) == 0
    assert {server.headers[0]["Impersonate-User"] for server in servers.values()} == {"jane"}


def test_a_subcommand_accepts_options_before_its_group(servers: Servers, file: str) -> None:
    main(["--cluster", "plant-b", "--kubeconfig", file, "trust", "show"])
    assert servers["plant-b"].asked
    assert not servers["plant-a"].asked


def test_clusters_and_users_are_completed_from_the_kubeconfig(file: str) -> None:
    bare = click.Command("get", params=[])
    named = connection_flags(lambda: None)
    options: dict[str, click.Option] = {each.name: each for each in named.__click_params__}
    root = click.Context(bare)
    root.params["kubeconfig"] = file  # given before the command
    for parent in (root, click.Context(click.Group("trust"), parent=root)):
        context = click.Context(get, parent=parent)
        for name in ("cluster", "user"):
            found = options[name].shell_complete(context, "plant-b")
            assert [each.value for each in found] == ["plant-b"], name
        found_contexts = complete_contexts(context, options["context"], "plant-a,")
        assert found_contexts == ["plant-a,plant-b"]

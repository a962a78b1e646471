"""Test the Python client with a server that answers as an API server does.

- A followed log has every line of an ended job, and of a job that ends while a slow reader follows
  it.
- An invalid job name reaches no server, neither through the client nor through the commands.
- Nothing is deleted without the UID of the job.
- A client connects by keywords as a command does by options, and prints no token.

Left out: a real API server (tests/cluster), and broken streams (test_cluster_streams.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import dlion
from dlion import kubernetes_backend
from dlion.errors import DataError, SpecError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.cluster.kubeconfig import is_configured
from manifest_table import smallest

LINES = 5_000
STARTED = "2026-01-01T00:00:00Z"


@dataclass
class Served:
    """The content of the server, and its requests."""

    uid: str = "u"
    has_ended: bool = False
    ends_with_log: bool = False
    requested: list[str] = field(default_factory=list)
    headers: dict[str, list[str]] = field(default_factory=dict)
    """Headers of the last request."""
    config: Path = Path()

    def answer(self, path: str) -> str:
        if "/log" in path:
            self.has_ended |= self.ends_with_log
            return "".join(
                f"2026-01-01T00:00:{number // 1000:02}.{number % 1000:03}Z line {number}\n"
                for number in range(LINES)
            )
        return json.dumps({"items": [self.pod()]} if "/pods" in path else self.job())

    def job(self) -> dict[str, Any]:
        job: dict[str, Any] = smallest()
        job["metadata"] = {
            "name": "digits", "namespace": "ml", "uid": self.uid, "generation": 1,
            "creationTimestamp": STARTED,
        }  # fmt: skip
        job["spec"]["runId"] = "1"
        ended = {
            "type": "Succeeded", "status": "True", "reason": "Completed", "message": "",
            "observedGeneration": 1, "lastTransitionTime": STARTED,
        }  # fmt: skip
        job["status"] = {
            "state": "Succeeded" if self.has_ended else "Training", "runId": "1",
            "observedGeneration": 1, "conditions": [ended] if self.has_ended else [],
        }  # fmt: skip
        return job

    @staticmethod
    def pod() -> dict[str, Any]:
        site = smallest()["spec"]["sites"][0]["name"]
        labels = {"dlion.dev/site": site, "dlion.dev/group": "w", "dlion.dev/worker-index": "0"}
        return {"metadata": {"name": "p", "creationTimestamp": STARTED, "labels": labels}}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requested.append(f"{self.command} {self.path}")
            names = {each.lower() for each in self.headers}
            state.headers = {each: self.headers.get_all(each, []) for each in names}
            content = state.answer(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        config = {
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "namespace": "ml"}}],
        }
        state.config = tmp_path / "config"
        state.config.write_text(json.dumps(config))
        yield state
        server.shutdown()


@pytest.fixture
def client(served: Served) -> Iterator[dlion.Client]:
    with dlion.Client("kubernetes", kubeconfig=str(served.config)) as made:
        yield made


ALL = [f"line {number}" for number in range(LINES)]


def test_the_followed_log_of_an_ended_job_is_whole(served: Served, client: dlion.Client) -> None:
    served.has_ended = True
    assert [*client.get_job_logs("digits", follow=True)] == ALL
    assert [*client.get_job_logs("digits")] == ALL
    assert not any("follow=true" in each for each in served.requested), (
        "an ended log needs no stream"
    )


def test_a_slow_reader_gets_the_whole_log_of_a_job_that_ends(
    served: Served, client: dlion.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_backend, "_POLL_S", 0.05)
    served.ends_with_log = True
    log = client.get_job_logs("digits", follow=True)
    lines = [next(log)]
    deadline_s = time.monotonic() + 20
    while any(thread.name == "end of digits" for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "the end is not noticed"
        time.sleep(0.02)
    assert [*lines, *log] == ALL
    assert any("follow=true" in each for each in served.requested)


SECRET = "s3cret"


def server(served: Served) -> str:
    config = json.loads(served.config.read_text())
    return str(config["clusters"][0]["cluster"]["server"])


def test_a_client_connects_by_keywords_without_a_kubeconfig(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with dlion.Client(
        "kubernetes", server=server(served), namespace="ml", token=SECRET, request_timeout_s=30,
        impersonated_user="jane", impersonated_groups=["dev", "ops"],
    ) as client:  # fmt: skip
        assert client.get_job("digits").name == "digits"
    assert "/namespaces/ml/" in served.requested[0]
    assert served.headers["authorization"] == [f"Bearer {SECRET}"]
    assert served.headers["impersonate-user"] == ["jane"]
    assert served.headers["impersonate-group"] == ["dev", "ops"]


def test_a_client_uses_another_entry_and_server_of_the_kubeconfig(served: Served) -> None:
    address, config = server(served), json.loads(served.config.read_text())
    config["clusters"].insert(0, {"name": "gone", "cluster": {"server": "http://127.0.0.1:1"}})
    config["users"] = [{"name": "bot", "user": {"token": SECRET}}]
    config["contexts"][0]["context"]["cluster"] = "gone"
    served.config.write_text(json.dumps(config))
    for keywords in ({"cluster": "c"}, {"server": f"{address}/"}):
        with dlion.Client("kubernetes", kubeconfig=served.config, user="bot", **keywords) as client:
            client.get_job("digits")
        assert served.headers["authorization"] == [f"Bearer {SECRET}"]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"server": "plant-a:6443"}, "server: 'plant-a:6443' is not a URL of a server"),
        ({"server": f"https://jane:{SECRET}@h"}, "server: the URL contains credentials"),
        ({"token": f"{SECRET}\nX-Admin: 1"}, "token: the value is empty, or has a space"),
        ({"token": SECRET.encode()}, r"token: is not valid \(given: bytes\); allowed: a str"),
        ({"impersonated_user": "jäne"}, "impersonated_user: .* not ASCII"),
        ({"impersonated_groups": ["dev"]}, "impersonated_groups needs impersonated_user"),
        ({"impersonated_user": "j", "impersonated_groups": "dev"}, "a list of the groups' names"),
        ({"impersonated_user": "j", "impersonated_groups": [""]}, "impersonated_groups: the value"),
        ({"request_timeout_s": "30s"}, r"request_timeout_s: .*str\); allowed: seconds from 0"),
        ({"request_timeout_s": float("nan")}, "given: nan"),
        ({"request_timeout_s": 10**400}, "seconds from 0"),
        ({"request_timeout_s": True}, "given: bool"),
        ({"insecure_skip_tls_verify": "no"}, "True or False"),
        (
            {"insecure_skip_tls_verify": True, "certificate_authority": "ca.pem"},
            "certificate_authority and insecure_skip_tls_verify exclude each other",
        ),
        ({"certificate_authority": 7}, "a str or pathlib.Path"),
        ({"context": ["x"]}, r"context: is not valid \(given: list\)"),
    ],
)
def test_wrong_keywords_are_refused_and_no_token_is_printed(
    keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        dlion.Client("kubernetes", **keywords)
    assert SECRET not in str(refused.value)


def test_a_missing_authority_is_named(served: Served, tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"kubeconfig": served.config}
    with pytest.raises(DataError, match=r"certificate authority .*ca\.pem: has no certificate"):
        dlion.Client("kubernetes", certificate_authority=tmp_path / "ca.pem", **keywords)


def test_a_kubeconfig_that_cannot_be_looked_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its content were given in place of its path."""
    path = "x" * 5_000
    with pytest.raises(DataError, match=r"kubeconfig x+: cannot be read: .*File name too long"):
        dlion.Client("kubernetes", kubeconfig=path)
    monkeypatch.setenv("KUBECONFIG", path)
    assert main(["get"]) == ExitCode.DATA
    assert is_configured(), "`dlion doctor` reports it"


NO_NAMES = ["", ".", "..", "a/b", "a..b", ".a", "-a", "A", "a b", "ä", "a\0", "a\n", "x" * 254]


@pytest.mark.parametrize("name", NO_NAMES)
def test_an_invalid_name_reaches_no_server(served: Served, client: dlion.Client, name: str) -> None:
    for method in (
        client.get_job, client.delete_job, client.get_job_logs, client.get_job_metrics,
        client.wait_for_job_status,
    ):  # fmt: skip
        with pytest.raises(SpecError, match="name: is not a job's name"):
            method(name)
    assert served.requested == []


def test_a_name_may_have_dots(served: Served, client: dlion.Client) -> None:
    assert client.get_job("a.b-1.c").name == "digits"
    assert served.requested[0].endswith("/dlionjobs/a.b-1.c")


@pytest.mark.parametrize(
    "arguments",
    [
        ["get", ""],
        ["delete", "..", "--yes"],
        ["delete", "", "--yes", "--ignore-not-found"],
        ["describe", "."],
        ["suspend", ""],
    ],
)
def test_a_command_refuses_an_invalid_name(served: Served, arguments: list[str]) -> None:
    command = subprocess.run(
        [sys.executable, "-m", "dlion_cli", *arguments, "--kubeconfig", str(served.config)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert command.returncode == ExitCode.SPEC, command.stderr
    assert "is not a job's name" in command.stderr
    assert "Traceback" not in command.stderr
    assert served.requested == []


def test_nothing_is_deleted_without_a_uid(served: Served, client: dlion.Client) -> None:
    served.uid = ""
    with pytest.raises(UnavailableError, match="without its UID"):
        client.delete_job("digits")
    assert not any(each.startswith("DELETE") for each in served.requested)
    served.uid = "u"
    client.delete_job("digits")
    assert served.requested[-1].startswith("DELETE")

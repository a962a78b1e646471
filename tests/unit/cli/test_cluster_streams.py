"""Test how the commands read streams of an API server, with scripted answers.

- A resumed log neither repeats nor loses a line, though the API server counts whole seconds and
  lines may have equal times. It ends with its pod, and retries after errors.
- A watch resumes after its end, after a cut within a line, and after an expired version. A new job
  of the same name is another one.
- A server that is not an API server is reported. A command in a pod ends with its exit code and
  closes its connection.

Left out: a real API server (tests/cluster).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.errors import AbsentError, DataError, DLionError, UnavailableError
from dlion_cli.cluster.client import ClusterClient, connect
from dlion_cli.cluster.cluster_jobs import JobClient
from dlion_cli.cluster.connection_settings import ConnectionSettings
from dlion_cli.pod_streams.log_lines import LogSource, follow_lines
from dlion_cli.views.job_updates import WaitTimeoutError, follow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = LogSource("w-0", "trainer", "small-0")
GONE = (404, json.dumps({"details": {"kind": "pods", "name": "w-0"}}))
STARTING = (400, json.dumps({"message": 'container "trainer" is waiting to start'}))


class Script:
    """The answers in order, and the requested paths."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.requested: list[str] = []


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def cluster(script: Script, tmp_path: Path) -> Iterator[ClusterClient]:
    """Return a connection to a server that gives the script's answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            script.requested.append(self.path)
            code, text = script.answers.pop(0) if script.answers else (503, "")
            self.send_response(code)
            self.send_header("Content-Length", str(len(text.encode()) + ("…" in text)))
            self.end_headers()  # with …, one byte is missing: a broken connection
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
        config = {
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{_port(server)}"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "namespace": "ml"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        made = connect(ConnectionSettings(kubeconfig=str(tmp_path / "config")))
        with contextlib.closing(made):
            yield made
        server.shutdown()


def _port(server: ThreadingHTTPServer) -> int:
    return int(server.server_address[1])


class NoPause(threading.Event):
    """A clock that passes pauses immediately."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def log(*lines: str) -> tuple[int, str]:
    return 200, "".join(f"2026-01-31T12:00:{line}\n" for line in lines)


def texts(cluster: ClusterClient, tail: int | None = None) -> list[str]:
    return [line.text for line in follow_lines(cluster, SOURCE, tail=tail, stop=NoPause())]


def test_a_resumed_log_repeats_no_line(cluster: ClusterClient, script: Script) -> None:
    script.answers = [
        log("01.1Z a", "01.2Z b", "01.2Z b"),
        log("01.1Z a", "01.2Z b", "01.2Z b", "01.2Z b", "01.3Z c"),
        (503, ""),
        log("01.1Z a", "01.2Z b", "01.2Z b", "01.2Z b", "01.3Z c"),
        STARTING,
        log("01.3Z c", "02.0Z d e"),
        GONE,
    ]
    assert texts(cluster, tail=3) == ["a", "b", "b", "b", "c", "d e"]
    assert "tailLines=3" in script.requested[0]
    assert all("tailLines" not in path for path in script.requested[1:])
    assert "sinceTime=2026-01-31T12%3A00%3A01.3Z" in script.requested[-2]


def test_times_are_compared_as_times(cluster: ClusterClient, script: Script) -> None:
    """A kubelet omits trailing zeros, and may use the zone of its node."""
    script.answers = [
        log("01.12Z a", "01.125Z b"),
        log("01.12Z a", "01.125Z b", "01.13Z c"),
        (200, "2026-01-31T14:00:01.13+02:00 c\nunable to retrieve container logs\n"),
        GONE,
    ]
    assert texts(cluster) == ["a", "b", "c"]


def test_a_log_waits_for_its_container(cluster: ClusterClient, script: Script) -> None:
    script.answers = [STARTING, (500, ""), log("01.0Z a"), GONE]
    assert texts(cluster, tail=5) == ["a"]
    assert all("tailLines=5" in path for path in script.requested[:3])


# ---- watching ------------------------------------------------------------------------------------


def job(version: int, uid: str = "u") -> dict[str, Any]:
    return {"metadata": {"name": "j", "uid": uid, "resourceVersion": str(version)}}


def events(*events: tuple[str, dict[str, Any]]) -> tuple[int, str]:
    return 200, "".join(json.dumps({"type": t, "object": o}) + "\n" for t, o in events)


def followed(cluster: ClusterClient, **options: Any) -> tuple[list[str], list[str]]:
    """Return the versions that the watch yields until the job is deleted, and its disconnects."""
    troubles: list[str] = []
    found = [
        each.version
        for each in follow(
            JobClient(cluster), "j", on_disconnect=troubles.append, sleep=lambda _s: None, **options
        )
    ]
    return found, troubles


def test_a_watch_resumes(cluster: ClusterClient, script: Script) -> None:
    expired = {"code": 410, "message": "too old"}
    script.answers = [
        (200, json.dumps(job(1))),
        events(("BOOKMARK", job(2)), ("MODIFIED", job(3))),
        (200, json.dumps(job(3))),
        events(("MODIFIED", job(4)), ("ERROR", expired), ("MODIFIED", job(99))),
        (200, json.dumps(job(5))),
        (200, json.dumps({"type": "MODIFIED", "object": job(6)}) + '\n{"type": "MODI'),
        (503, ""),
        (200, json.dumps(job(7))),
        (200, json.dumps({"type": "MODIFIED", "object": job(8)}) + '\n"…"'),
        (200, json.dumps(job(8))),
        events(("DELETED", job(9))),
    ]
    found, troubles = followed(cluster)
    assert found == ["1", "3", "4", "5", "6", "7", "8"]
    assert len(troubles) == 2
    assert "503" in troubles[0]
    assert "resourceVersion=1&" in script.requested[1]
    assert "resourceVersion=3&" in script.requested[3]


def test_watches_that_end_at_once_are_not_repeated_without_a_pause(
    cluster: ClusterClient, script: Script
) -> None:
    pauses_s: list[float] = []
    for _ in range(4):
        script.answers += [(200, json.dumps(job(1))), events()]
    script.answers += [(200, json.dumps(job(1))), events(("DELETED", job(2)))]
    assert [e.version for e in follow(JobClient(cluster), "j", sleep=pauses_s.append)] == ["1"]
    assert len(pauses_s) == 4
    assert min(pauses_s) > 0.1


def test_a_time_limit_of_a_python_caller_may_be_infinite(
    cluster: ClusterClient, script: Script
) -> None:
    script.answers = [(200, json.dumps(job(1))), events(("DELETED", job(2)))]
    assert followed(cluster, timeout_s=float("inf"))[0] == ["1"]
    assert "timeoutSeconds=60" in script.requested[1]


def test_a_new_job_of_the_same_name_is_another(cluster: ClusterClient, script: Script) -> None:
    script.answers = [(200, json.dumps(job(1))), events(), (200, json.dumps(job(2, "other")))]
    assert followed(cluster)[0] == ["1"]


def test_a_first_failure_is_raised(cluster: ClusterClient, script: Script) -> None:
    script.answers = [(500, "")]
    with pytest.raises(UnavailableError, match="is temporarily unavailable"):
        followed(cluster)
    script.answers = [(404, json.dumps({"details": {"kind": "dlionjobs", "name": "j"}}))]
    with pytest.raises(AbsentError, match="no DLionJob 'j'"):
        followed(cluster)


def test_the_time_limit_holds_while_the_server_is_unreachable(
    cluster: ClusterClient, script: Script
) -> None:
    now_s = [0.0]
    script.answers = [(200, json.dumps(job(1)))]  # and then 503 without end

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    with pytest.raises(WaitTimeoutError):
        for _ in follow(JobClient(cluster), "j", timeout_s=60, clock=lambda: now_s[0], sleep=sleep):
            pass
    assert now_s[0] == pytest.approx(60)
    assert len(script.requested) < 15  # pauses have grown


@pytest.mark.parametrize("answer", ["<html>log in here</html>", "[]", "", "\x00"])
def test_a_server_that_is_not_an_api_server_is_reported(
    cluster: ClusterClient, script: Script, answer: str
) -> None:
    script.answers = [(200, answer)]
    with pytest.raises(DLionError, match="Check that it is a Kubernetes API server"):
        JobClient(cluster).get("j")


# ---- commands ------------------------------------------------------------------------------------


def frame(channel: int, content: bytes) -> bytes:
    payload = bytes([channel]) + content
    return bytes([0x82, len(payload)]) + payload


def ran(tmp_path: Path, *frames: bytes) -> bytes:
    """Return the output of a command, from a server that sends these frames and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            near, _ = listener.accept()
            with near:
                requested = near.recv(65536).decode()
                key = re.search("Sec-WebSocket-Key: (.*)\r", requested, re.IGNORECASE)
                assert key is not None
                magic = (key[1] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()
                accept = base64.b64encode(hashlib.sha1(magic).digest()).decode()
                near.sendall(
                    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                    "Connection: Upgrade\r\nSec-WebSocket-Protocol: v4.channel.k8s.io\r\n"
                    f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
                )
                near.sendall(b"".join(frames))
                near.recv(65536)

        thread = threading.Thread(target=serve)
        thread.start()
        config = {
            "current-context": "x",
            "clusters": [
                {
                    "name": "c",
                    "cluster": {"server": f"http://127.0.0.1:{listener.getsockname()[1]}"},
                }
            ],
            "contexts": [{"name": "x", "context": {"cluster": "c"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        cluster = connect(ConnectionSettings(kubeconfig=str(tmp_path / "config")))
        try:
            return b"".join(cluster.exec_command("k", "keeper", ["python"]))
        finally:
            thread.join()


CLOSE = b"\x88\x00"
SUCCESS = frame(3, b'{"status": "Success"}')


def test_a_command_ends_with_its_exit_code(tmp_path: Path) -> None:
    """An open connection would fail this test by its warning."""
    output = ran(tmp_path, frame(1, b"a"), frame(2, b"w"), frame(1, b"b"), SUCCESS, CLOSE)
    assert output == b"ab"
    failure = frame(3, b'{"status": "Failure", "message": "exit code 1"}')
    with pytest.raises(DataError, match="pod k: no room"):
        ran(tmp_path, frame(2, b"no room\n"), failure, CLOSE)
    with pytest.raises(DataError, match=r"pod k: a\nb·\[2J·$"):
        ran(tmp_path, frame(2, b"a\nb\x1b[2J\x07\n"), failure, CLOSE)
    with pytest.raises(DataError, match="exit code 1"):
        ran(tmp_path, failure, CLOSE)
    for statuses in ([], [b"[]"], [b"[" * 100] * 1000):
        with pytest.raises(UnavailableError, match="broke before the command had ended"):
            ran(tmp_path, frame(1, b"a"), *(frame(3, each) for each in statuses), CLOSE)

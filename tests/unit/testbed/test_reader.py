"""Test `testbed.reader`, which requests what `kubectl get` prints, or delegates to kubectl."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from testbed.reader import Reader, reader_of


def kind(plural: str, name: str, *short: str, scope: str = "Namespaced") -> dict[str, Any]:
    return {
        "resource": plural,
        "responseKind": {"kind": name},
        "scope": scope,
        "singularResource": name.lower(),
        "shortNames": list(short),
    }


def group(name: str, *kinds: dict[str, Any]) -> dict[str, Any]:
    versions = [{"version": "v1", "resources": list(kinds)}]
    return {"metadata": {"name": name} if name else {}, "versions": versions}


PODS = kind("pods", "Pod", "po")
NODES = kind("nodes", "Node", scope="Cluster")
ANSWERS: dict[str, Any] = {
    "/api": {
        "items": [group("", kind("pods", "Pod", "po"), kind("nodes", "Node", scope="Cluster"))]
    },
    "/apis": {"items": [group("batch", kind("jobs", "Job"), kind("pods", "OtherPod"))]},
    "/api/v1/namespaces/ml/pods": {"items": [{"metadata": {"name": "a"}}]},
    "/api/v1/namespaces/default/pods?labelSelector=a%3Db": {"items": []},
    "/api/v1/pods": {"items": [{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]},
    "/api/v1/namespaces/ml/pods/a": {"kind": "Pod", "metadata": {"name": "a"}},
    "/api/v1/nodes": {"items": []},
    "/apis/batch/v1/namespaces/ml/jobs": {"items": [{"metadata": {"name": "j"}}]},
}


CONNECTIONS: set[object] = set()
"""The addresses of the callers."""


class ApiServer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        CONNECTIONS.add(self.client_address)
        assert self.headers["Authorization"] == "Bearer secret"
        found = ANSWERS.get(self.path)
        body = json.dumps(found or {"kind": "Status"}).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """Return a kubeconfig of an API server with these answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ApiServer) as server:
        threading.Thread(target=server.serve_forever).start()
        config = folder / "kubeconfig"
        address = f"http://127.0.0.1:{server.server_port}"
        config.write_text(json.dumps({
            "current-context": "one",
            "contexts": [{"name": "one", "context": {"cluster": "one", "user": "one"}}],
            "clusters": [{"name": "one", "cluster": {"server": address}}],
            "users": [{"name": "one", "user": {"token": "secret"}}],
        }))  # fmt: skip
        try:
            yield config
        finally:
            server.shutdown()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with serving(tmp_path) as config:
        made = reader_of(config, "")
        assert made is not None
        yield made
        made.close()


def names(found: Any) -> list[tuple[str, str, str]]:
    items = found["items"]
    return [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in items]


def test_lists_and_objects_are_as_kubectl_prints_them(reader: Reader) -> None:
    CONNECTIONS.clear()
    pod = ("v1", "Pod", "a")
    assert names(reader.get(("pods,jobs",), "ml")) == [pod, ("batch/v1", "Job", "j")]
    assert names(reader.get(("po", "-A"), "ml")) == [pod, ("v1", "Pod", "b")]
    assert names(reader.get(("Pod", "-l", "a=b"), "")) == []
    assert names(reader.get(("nodes",), "ml")) == []
    assert reader.get(("pod", "a"), "ml") == {"kind": "Pod", "metadata": {"name": "a"}}
    assert len(CONNECTIONS) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("pod", "b"),
        ("certificates",),
        ("pod", "a", "--show-labels"),
        ("deployment/a",),
        ("--raw=/",),
    ],
)
def test_other_arguments_are_delegated_to_kubectl(
    reader: Reader, arguments: tuple[str, ...]
) -> None:
    assert reader.get(arguments, "ml") is None


def test_an_unreachable_server_is_delegated_to_kubectl(tmp_path: Path) -> None:
    with serving(tmp_path) as config:
        reader = reader_of(config, "")
        assert reader is not None
        assert names(reader.get(("pods",), "ml"))
        reader.close()
    assert reader.get(("pods",), "ml") is None

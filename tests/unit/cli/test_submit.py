"""Test what `dlion submit -o json|yaml` prints, with a server that answers as an API server does.

Left out: a real API server (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from manifest_table import changed, smallest
from scripted_servers import PATCHES, Server, served

if TYPE_CHECKING:
    from pathlib import Path

    from scripted_servers import Answer


def submitted(path: Path, names: list[str], output: str, refused: str = "") -> int:
    """Submit a file with jobs of these names; return the exit code."""
    manifests = [changed(smallest(), {"metadata": {"name": name}}) for name in names]
    (path / "jobs.yaml").write_text(yaml.safe_dump_all(manifests))

    def apply() -> Answer:
        document = json.loads(script.patches[-1][2])
        code = 403 if document["metadata"]["name"] == refused else 201
        return code, json.dumps(document)

    script = Server({"dlionjobs": (200, '{"items": []}'), PATCHES: apply})
    with served(path / "config", {"a": script}) as file:
        return main(["submit", str(path / "jobs.yaml"), "-o", output, "--kubeconfig", file])


def names_in(text: str, output: str) -> Any:
    document = json.loads(text) if output == "json" else yaml.safe_load(text)
    if document["kind"] == "DLionJob":
        return document["metadata"]["name"]
    assert document["kind"] == "DLionJobList"
    return [each["metadata"]["name"] for each in document["items"]]


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_jobs_are_printed_as_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    assert submitted(tmp_path, ["a"], output) == 0
    assert names_in(capsys.readouterr().out, output) == "a"
    assert submitted(tmp_path, ["a", "b"], output) == 0
    assert names_in(capsys.readouterr().out, output) == ["a", "b"]
    assert submitted(tmp_path, ["a", "b"], output, refused="a") == ExitCode.DENIED
    assert names_in(capsys.readouterr().out, output) == ["b"]

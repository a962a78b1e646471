"""Test that commands import only the modules that they need.

- No module of a command that reads a cluster imports the classes of a manifest, which take a fifth
  of its start.
- Commands that print no table do not import rich. None imports urllib3 before it connects, nor
  TensorFlow or asyncio.
- A command imports the Kubernetes client, which would take two thirds of its start, only to renew
  credentials.
- `describe` and `events` read a keeper's files for few runs, and import the code for it only then.
- `render` asks no cluster and signs nothing: it imports no code for a connection or certificates.
- `validate --no-run` prints plain text, without rich.
- `run` imports numba, half of its start, only once the manifest is valid.
- `report` draws in the browser: it imports matplotlib only for a picture.
- To list the commands or to complete their names imports none of them.

Left out: the time itself (benchmarks/command_start.py).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_results.run_folder.folder import ResultFolder
from dlion_results.summary.summary import Ending
from scripted_servers import Server, served
from synthetic_run import Story, description, records

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NEVER = ("asyncio", "kubernetes", "numpy", "pydantic", "tensorflow", "urllib3")
MANIFEST = ("dlion_api.document", "dlion_api.spec")
CLUSTER = "dlion_cli.commands.cluster."
HEAVY = ("asyncio", "dateutil", "kubernetes", "oauthlib", "pydantic", "requests", "websocket")
KEPT = "dlion_cli.pod_streams.kept_records"
CONNECTION = ("dlion_cli.cluster.client", "dlion_cli.cluster.cluster_jobs", "ssl")
MANIFEST_FILE = Path(__file__).parents[3] / "examples" / "digits.yaml"


@pytest.mark.parametrize(
    ("commands", "unneeded"),
    [
        (("describe", "events"), (*MANIFEST, KEPT, "dlion_environments")),
        (("fetch", "get", "top", "wait"), MANIFEST),
        (("delete", "logs", "scale", "suspend_resume"), (*MANIFEST, "rich")),
        (("submit",), ("rich",)),
    ],
)
def test_a_cluster_command_imports_only_what_it_needs(
    commands: tuple[str, ...], unneeded: tuple[str, ...]
) -> None:
    code = f"""
import importlib, sys
for command in {commands!r}:
    importlib.import_module({CLUSTER!r} + command)
    print([command, [name for name in {(*NEVER, *unneeded)!r} if name in sys.modules]])
"""
    for line in output_of("import dlion_cli.command_line" + code).splitlines():
        command, imported = ast.literal_eval(line)
        assert imported == [], command


RUN = [
    "get", "get digits", "describe digits", "top digits", "events digits", "wait digits",
    "logs digits", "fetch digits", "suspend digits", "delete digits --yes",
    "scale digits --site plant-a --group small --workers 3", f"submit {MANIFEST_FILE}",
]  # fmt: skip


def test_a_command_with_a_token_runs_without_the_kubernetes_client(tmp_path: Path) -> None:
    code = f"""
import sys
from dlion_cli.command_line import run
print({{line: int(run(line.split())) for line in {RUN!r}}})
print([name for name in {HEAVY!r} if name in sys.modules])
print("urllib3" in sys.modules)
"""
    server = Server({}, user={"token": "secret"})
    with served(tmp_path / "config", {"here": server}) as file:
        *_, codes, imported, is_connected = output_of(code, {"KUBECONFIG": file}).splitlines()
    assert set(ast.literal_eval(codes).values()) == {ExitCode.UNAVAILABLE}, "the server answers 503"
    assert (imported, is_connected) == ("[]", "True")


def test_rendering_imports_no_connection_and_no_certificates() -> None:
    code = f"""
import sys
from dlion_cli.command_line import run
code = run(["render", {str(MANIFEST_FILE)!r}, "--site", "plant-a"])
print(code, *sys.modules)
"""
    code, *imported = output_of(code).splitlines()[-1].split()
    assert code == "0"
    assert {*CONNECTION, "cryptography"}.isdisjoint(imported)


def test_validating_without_a_run_draws_nothing() -> None:
    code = f"""
import sys
from dlion_cli.command_line import run
code = run(["validate", "--no-run", {str(MANIFEST_FILE)!r}])
print(code, *sys.modules)
"""
    code, *imported = output_of(code).splitlines()[-1].split()
    assert code == "0"
    assert {*CONNECTION, *NEVER, "rich"}.isdisjoint(imported)


def test_a_run_of_an_invalid_manifest_imports_no_numba(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text("kind: DLionJob\n")
    code = f"""
import sys
from dlion_cli.command_line import run
code = run(["run", {str(manifest)!r}])
print(code, *sys.modules)
"""
    code, *imported = output_of(code).splitlines()[-1].split()
    assert int(code) == ExitCode.SPEC
    assert "numba" not in imported


def test_a_report_without_a_picture_imports_no_matplotlib(tmp_path: Path) -> None:
    story = Story(workers=2, seconds=4, killed=None)
    with ResultFolder.create(tmp_path / "run", description(story), now=NOW) as folder:
        for record in records(story):
            folder.append(record)
        folder.finish(Ending("maxSeconds"))
    code = f"""
import sys
from dlion_cli.command_line import run
code = run(["report", {str(folder.path)!r}])
print(code, *sys.modules)
"""
    code, *imported = output_of(code).splitlines()[-1].split()
    assert code == "0"
    assert "matplotlib" not in imported


@pytest.mark.parametrize("line", [None, "dlion "])
def test_the_list_of_commands_imports_none_of_them(line: str | None) -> None:
    completing = {"_DLION_COMPLETE": "bash_complete", "COMP_WORDS": str(line), "COMP_CWORD": "1"}
    code = f"""
import sys
sys.argv = ["dlion", *{[] if line else ["--help"]}]
from dlion_cli.command_line import run
try:
    run(None)
finally:  # completion exits
    print([name for name in sys.modules if name.startswith("dlion_cli.commands.")])
"""
    *listed, imported = output_of(code, completing if line else {}).splitlines()
    assert "plain,describe" in listed or any(each.split()[:1] == ["describe"] for each in listed)
    assert imported == "[]"


def output_of(code: str, environment: dict[str, str] | None = None) -> str:
    """Return what Python prints."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **(environment or {})},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return ended.stdout

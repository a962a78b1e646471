"""Test shell completion, the list of commands, and misspelt commands.

- Shells accept the scripts of `dlion completion`. A real bash completes commands, values after `=`,
  lists with commas, and fields level by level.
- Contexts come from the kubeconfig, namespaces from the API server. A failing cluster or kubeconfig
  gives no completion. No large module is imported.
- The error for a misspelt command names the intended one.

Left out: zsh and fish, unless they are installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click
import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.cluster.cluster_options import complete_contexts, complete_namespaces
from dlion_cli.command_line import COMMANDS, SECTIONS
from dlion_cli.commands.cluster.get import get
from dlion_cli.terminal.completion import complete_assignments, complete_fields
from scripted_servers import Server, served

if TYPE_CHECKING:
    from pathlib import Path

OPTION = click.Option(["--x"])


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_accepts_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert "_DLION_COMPLETE" in text
    assert re.search(rf"_DLION_COMPLETE={shell}_complete", text)
    if (program := shutil.which(shell)) is not None:
        checked = subprocess.run([program, "-n"], input=text, text=True, check=False,
                                 capture_output=True, timeout=60)  # fmt: skip
        assert (checked.returncode, checked.stderr) == (0, "")


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == ExitCode.USAGE
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


HARNESS = """
source "$1"
compopt() { echo "compopt $2" >&2; }
COMP_LINE="$2"; COMP_POINT=${#2}; COMP_WORDBREAKS=$' \t\n"><=;|&(:'
_dlion_completion dlion
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, text: str, line: str) -> tuple[list[str], str]:
    """Return what bash offers for the line, and its options (nospace)."""
    dlion = folder / "dlion"
    start = "import sys; sys.argv[0] = 'dlion'; from dlion_cli.__main__ import main; main()"
    dlion.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{start}"\n')
    dlion.chmod(0o755)
    (folder / "script").write_text(text)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", HARNESS, "bash", str(folder / "script"), line],
        check=True, capture_output=True, text=True, timeout=60, env={**os.environ, **path},
    )  # fmt: skip
    return done.stdout.split(), done.stderr


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    for line, offered, options in (
        ("dlion s", [name for name in COMMANDS if name.startswith("s")], ""),
        ("dlion simulate job.yaml -e qu", ["quickstart"], ""),
        ("dlion simulate job.yaml --environment=two", ["two-clouds", "two-clouds-hetero"], ""),
        ("dlion compare x --policies=adaptive,twos", ["adaptive,twostep"], ""),
        ("dlion wait digits --for=condition=Su", ["Suspended", "Succeeded"], ""),
        ("dlion wait digits --for tra", ["training"], ""),
        ("dlion run x --set exchange.topology=ri", ["ring"], ""),
        ("dlion run x --set exchange.topo", ["exchange.topology="], "compopt nospace\n"),
        ("dlion explain trainer.opt", ["trainer.optimizer."], "compopt nospace\n"),
    ):
        assert completed(tmp_path, text, line) == (offered, options), line


def test_bash_completes_text_after_a_colon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bash treats a colon as the end of a word, and would repeat the text before it."""
    config = tmp_path / "config"
    contexts = [{"name": f"arn:aws:eks:us:1:cluster/{each}", "context": {}} for each in "ab"]
    config.write_text(yaml.safe_dump({"contexts": contexts}))
    for option in ("--context ", "--context="):
        line = f"dlion get --kubeconfig {config} {option}arn:aws:eks:us:1:cluster/a"
        assert completed(tmp_path, script("bash", capsys), line) == (["cluster/a"], "")


def names(items: object) -> list[str]:
    assert isinstance(items, list)
    return [each if isinstance(each, str) else each.value for each in items]


def test_fields_are_completed_level_by_level() -> None:
    context = click.Context(get)
    top = names(complete_fields(context, OPTION, ""))
    assert {each.rstrip(".") for each in top} >= {"trainer", "sites", "minSites", "exchange"}
    assert "spec.trainer.stop." in names(complete_fields(context, OPTION, "spec.trainer.st"))
    assert names(complete_fields(context, OPTION, "status.obs")) == ["status.observedGeneration"]
    assert names(complete_fields(context, OPTION, "nonsense.x")) == []
    assert names(complete_assignments(context, OPTION, "suspend=")) == [
        "suspend=true", "suspend=false"
    ]  # fmt: skip
    assert "exchange.policy=adaptive" in names(
        complete_assignments(context, OPTION, "exchange.policy=ad")
    )
    assert names(complete_assignments(context, OPTION, "minSites=")) == []
    assert names(complete_assignments(context, OPTION, "no.such=")) == []


def test_contexts_come_from_the_kubeconfig(tmp_path: Path) -> None:
    file = tmp_path / "config"
    contexts = [{"name": name, "context": {}} for name in ("plant-a", "plant-b", "other")]
    file.write_text(yaml.safe_dump({"contexts": contexts}))
    context = click.Context(get)
    context.params["kubeconfig"] = str(file)
    for begun, offered in (
        ("", ["plant-a", "plant-b", "other"]),
        ("pl", ["plant-a", "plant-b"]),
        ("plant-a,pl", ["plant-a,plant-b"]),
        ("x", []),
    ):
        assert names(complete_contexts(context, OPTION, begun)) == offered
    file.write_text("{")
    assert complete_contexts(context, OPTION, "") == []
    context.params["kubeconfig"] = "/nowhere"
    assert complete_contexts(context, OPTION, "") == []


def test_namespaces_come_from_the_cluster(tmp_path: Path) -> None:
    items = [{"metadata": {"name": name}} for name in ("ml", "edge", "mlops")] + [{}]
    good = Server({"namespaces": (200, json.dumps({"items": items}))})
    with ExitStack() as stack:
        servers = {"a": good, "b": Server({}), "c": None}
        file = stack.enter_context(served(tmp_path / "config", servers))
        context = click.Context(get)
        for name, offered in (("a", ["ml", "mlops"]), ("b", []), ("c", [])):
            context.params.update(kubeconfig=file, context=name)
            assert names(complete_namespaces(context, OPTION, "m")) == offered


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dlion_cli.__main__ import main;"
        "codes = [main(['completion', s]) for s in ('bash', 'zsh', 'fish')];"
        "heavy = {'tensorflow', 'grpc', 'numpy', 'keras', 'kubernetes'} & set(sys.modules);"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("simulat", 'no such command "simulat"; did you mean "simulate"?'),
        ("Describe", 'no such command "Describe"; did you mean "describe"?'),
        ("wacth", 'did you mean "watch"?'),
        ("qqq", 'no such command "qqq"; dlion --help lists all'),
        ("--wrong", "No such option"),
    ],
)
def test_the_error_for_a_misspelt_command_names_the_intended_one(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([given]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_help_lists_the_commands_in_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n{section}:") for section in SECTIONS]
    assert places == sorted(places)
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", out, re.MULTILINE)

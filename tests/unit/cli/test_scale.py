"""Test `dlion scale`, which changes one number of one group at all sites or at none.

- The patch changes one field and tests names and the old number, so that neither a moved group nor
  another client's change is lost.
- Unknown names are refused with the known ones. An ended run is not changed. With several contexts
  a refusal by one changes none.
- The user learns that the manifest must be the same at every site, and which policy limits growth.

Left out: the API server's own rules (tests/cluster/test_cli.py).
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from manifest_table import changed, smallest
from scripted_servers import Server, served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SITES = [
    {"name": "plant-a", "groups": [{"name": "big", "workers": 1}, {"name": "small", "workers": 3}]},
    {"name": "plant-b", "groups": [{"name": "large", "workers": 1}]},
]
SMALL = ["--site", "plant-a", "--group", "small"]


def job(*, small: int = 3, sites: Any = None, reason: str = "", **spec: Any) -> dict[str, Any]:
    given = {"metadata.name": "digits", "spec.runId": "1",
             "spec.sites": json.loads(json.dumps(sites or SITES))}  # fmt: skip
    made = changed(smallest(), given | spec)
    made["spec"]["sites"][0]["groups"][-1]["workers"] = small
    ended = [{"type": "Succeeded", "status": "True", "reason": reason}] if reason else []
    return made | {"status": {"runId": "1", "conditions": ended}}


def server(before: dict[str, Any], after: dict[str, Any] | None = None, code: int = 200,
           now: dict[str, Any] | None = None) -> Server:  # fmt: skip
    """Return a server; `now` is the job that it returns after a patch."""
    body = after or {"message": "the server rejected our request due to an error in our request"}
    scripted: Server

    def read() -> tuple[int, str]:
        return 200, json.dumps(now if now and scripted.patches else before)

    scripted = Server({"digits": read, "PATCH": (code, json.dumps(body))})
    return scripted


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a file with a context for each given server."""
    with ExitStack() as stack:
        yield lambda **servers: stack.enter_context(served(tmp_path / "kubeconfig", servers))


def test_one_field_is_changed_and_its_context_is_tested(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = server(job(), job(small=5))
    file = kubeconfig(a=scripted)
    assert main(["scale", "digits", *SMALL, "--workers", "5", "--kubeconfig", file]) == 0
    captured = capsys.readouterr()
    assert captured.out == "dlionjob.dlion.dev/digits scaled: plant-a/small 3 → 5\n"
    assert "scale it there, too (--contexts), with plant-b" in captured.err
    ((address, content_type, body),) = scripted.patches
    assert urlsplit(address).path.endswith("/namespaces/ml/dlionjobs/digits")
    assert parse_qs(urlsplit(address).query) == {"fieldManager": ["dlion-cli"]}
    assert content_type == "application/json-patch+json"
    assert json.loads(body) == [
        {"op": "test", "path": "/spec/sites/0/name", "value": "plant-a"},
        {"op": "test", "path": "/spec/sites/0/groups/1/name", "value": "small"},
        {"op": "test", "path": "/spec/sites/0/groups/1/workers", "value": 3},
        {"op": "replace", "path": "/spec/sites/0/groups/1/workers", "value": 5},
    ]


def test_the_same_number_changes_nothing(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = kubeconfig(a=server(job(), job()))
    assert main(["scale", "digits", *SMALL, "--workers", "3", "--kubeconfig", file]) == 0
    assert "unchanged: plant-a/small has 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--site", "plant-c", "--group", "small"], ExitCode.SPEC, "allowed: plant-a, plant-b"),
        (["--site", "plant-a", "--group", "large"], ExitCode.SPEC, "allowed: big, small"),
        ([*SMALL[:2]], ExitCode.USAGE, "Missing option '--group'"),
    ],
)
def test_unknown_names_are_refused(
    kubeconfig: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    scripted = server(job())
    command = ["scale", "digits", "--workers", "5", "--kubeconfig", kubeconfig(a=scripted)]
    assert main([*command, *words]) == code
    assert message in capsys.readouterr().err
    assert not scripted.patches


@pytest.mark.parametrize("workers", ["0", "-1", "x", "1e3", "99999999999"])
def test_wrong_numbers_are_refused(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "digits", *SMALL, "--workers", workers]) == ExitCode.USAGE
    assert "--workers" in capsys.readouterr().err


def test_an_ended_run_is_not_changed(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = server(job(reason="Completed"))
    command = ["scale", "digits", *SMALL, "--workers", "5", "--kubeconfig", kubeconfig(a=scripted)]
    assert main(command) == ExitCode.SPEC
    assert "digits: its run has ended (Succeeded)" in capsys.readouterr().err
    assert not scripted.patches


@pytest.mark.parametrize("now", [job(small=4), job(sites=[*reversed(SITES)])])
def test_a_concurrent_change_is_a_conflict(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str], now: dict[str, Any]
) -> None:
    file = kubeconfig(a=server(job(), code=422, now=now))
    assert main(["scale", "digits", *SMALL, "--workers", "5", "--kubeconfig", file]) == (
        ExitCode.DENIED
    )
    assert "another client changed spec.sites[plant-a].groups[small]" in capsys.readouterr().err


def test_a_refusal_by_a_rule_is_reported(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = {
        "details": {"causes": [{"field": "spec.sites", "message": "Invalid value: too many"}]}
    }
    file = kubeconfig(a=server(job(), refusal, code=422))
    command = ["scale", "digits", *SMALL, "--workers", "500", "--kubeconfig", file]
    assert main(command) == ExitCode.SPEC
    assert "too many" in capsys.readouterr().err


def test_all_contexts_are_checked_before_any_is_changed(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    good, refusing = server(job(), job(small=5)), server(job(), {"message": "no"}, code=422)
    file = kubeconfig(a=good, b=refusing)
    command = ["scale", "digits", *SMALL, "--workers", "5", "--kubeconfig", file, "--contexts"]
    assert main([*command, "a,b"]) == ExitCode.SPEC
    captured = capsys.readouterr()
    assert "context b: " in captured.err
    assert "nothing was changed in any context" in captured.err
    assert not captured.out
    assert ["dryRun=All" in address for address, _, _ in good.patches] == [True]
    assert main([*command, "a"]) == 0
    assert capsys.readouterr().out == "a  dlionjob.dlion.dev/digits scaled: plant-a/small 3 → 5\n"
    assert ["dryRun=All" in address for address, _, _ in good.patches] == [True, True, False]


def test_a_policy_that_knows_its_workers_beforehand_is_named(
    kubeconfig: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    ring = {"spec.exchange": {"policy": "dlion", "topology": "ring"}}
    file = kubeconfig(a=server(job(**ring), job(small=5, **ring)))
    assert main(["scale", "digits", *SMALL, "--workers", "5", "--kubeconfig", file]) == 0
    assert "policy dlion with topology ring must know its workers" in capsys.readouterr().err

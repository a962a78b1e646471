"""Tests of policies from installed packages.

Any exception from such a policy, or any result that breaks the interface, becomes one error. The
error names the policy, its file and line, and the exception. `dlion explain` continues with the
other policies. DLion's own policies are not changed.

Left out: a whole job with such a policy (tests/simulated/test_writing_a_policy.py).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlion_api.errors import ContractError, ProgramError, SpecError
from dlion_api.exit_codes import ExitCode
from dlion_api.names import Rank
from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_core.codecs import NotFiniteError
from dlion_core.policies import catalogue, factory
from dlion_core.policies.interface import Layout, LocalStepDone, MemberJoined
from local_run import job_document

NUMBERS = itertools.count()
LAYOUT = Layout(("kernel",), (8,))
SOURCE = """
from dlion_core.codecs import GradientPart, NotFiniteError
from dlion_core.policies.factory import gradient_machine
from dlion_core.policies.catalogue import Policy
from dlion_core.policies.gradient.gradient_selectors import OutgoingPayloads


class Mine:
    combines = True

    def prepare(self, gradient_D, peers, budget_bytes):
        {prepare}

    def forget(self, peer):
        pass

    def state(self):
        return {{}}

    def restore(self, state):
        pass


def build({arguments}):
    return {machine}


def check(spec, parameters, ranks):
    {check}


POLICY = Policy("Mine.", build, check=check)
{last}
"""
WHOLE = {
    "prepare": "return OutgoingPayloads({}, GradientPart(gradient_D))",
    "arguments": "context, parameters",
    "machine": "gradient_machine(context, Mine())",
    "check": "return []",
    "last": "",
}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the policy `mine` with parts of its source replaced; return its file."""
    module = f"mine_{next(NUMBERS)}"  # a module is imported only once

    def made(**parts: str) -> Path:
        about = tmp_path / "mine-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
        points = f"[{catalogue.GROUP}]\nmine = {module}:POLICY\n"
        (about / "entry_points.txt").write_text(points)
        path = tmp_path / f"{module}.py"
        path.write_text(SOURCE.format(**{**WHOLE, **parts}))
        monkeypatch.syspath_prepend(tmp_path)
        return path

    return made


def line_of(path: Path, words: str) -> str:
    """Return `file:line` of this text."""
    lines = path.read_text().splitlines()
    return f"{path}:{1 + next(n for n, line in enumerate(lines) if words in line)}"


def a_step_is_made() -> Any:
    spec = load_job(job_document(2, exchange={"policy": "mine"})).spec
    machine = factory.build(spec, Rank(0), LAYOUT, [Rank(0), Rank(1)])
    machine.handle(MemberJoined(Rank(1)))
    return machine.handle(LocalStepDone(1, np.ones(8, np.float32), 4, 1.0))


def test_a_policy_that_obeys_the_interface_is_not_changed(install: Any) -> None:
    install()
    assert a_step_is_made()


@pytest.mark.parametrize(
    ("parts", "line", "expected"),
    [
        ({"prepare": 'raise ValueError("boom")'}, "boom", "prepare failed{at}: ValueError: boom"),
        (
            {"prepare": "return None"},
            "def prepare",
            "prepare{at} yields NoneType; allowed: an OutgoingPayloads.",
        ),
        (
            {"prepare": "return OutgoingPayloads({1: 'x'}, GradientPart(gradient_D))"},
            "def prepare",
            "prepare{at} yields str; allowed: payloads of bytes",
        ),
        ({"prepare": "raise SystemExit(3)"}, "Exit(3)", "prepare failed{at}: SystemExit: 3"),
        ({"arguments": "context"}, "def build", "machine failed{at}: TypeError: build() takes 1"),
        (
            {"machine": "None"},
            "def build",
            "build{at} yields NoneType; allowed: a PolicyMachine, w",
        ),
        ({"machine": "Mine() + 1"}, "Mine() + 1", "making a worker's machine failed{at}: TypeErr"),
        ({"check": "return 1 / 0"}, "1 / 0", "checking the manifest failed{at}: ZeroDivisionErr"),
        ({"check": "return ['no']"}, "", "checking the manifest failed: AttributeError: 'str' ob"),
        ({"last": "import nosuchmodule"}, "import nosuch", "loading failed{at}: ModuleNotFoundErr"),
        ({"last": "def x(:"}, "def x(:", "loading failed{at}: SyntaxError: invalid syntax"),
        ({"last": "del POLICY"}, "", "loading failed: AttributeError: module"),
    ],
)
def test_a_failure_names_the_policy_its_line_and_the_exception(
    install: Any, parts: dict[str, str], line: str, expected: str
) -> None:
    path = install(**parts)
    with pytest.raises(ProgramError) as raised:
        a_step_is_made()
    words = str(raised.value)
    assert words.startswith(f"policy mine ({path.stem}:POLICY): ")
    assert expected.format(at=f" at {line_of(path, line)}" if line else "") in words


def test_values_that_are_not_finite_are_not_a_fault_of_the_policy(install: Any) -> None:
    install(prepare='raise NotFiniteError("a NaN")')
    with pytest.raises(NotFiniteError):
        a_step_is_made()


def test_an_error_that_it_finds_in_a_manifest_is_one_of_the_manifest(install: Any) -> None:
    install(check='from dlion_api.errors import Problem; return [Problem("spec.x", "is wrong")]')
    with pytest.raises(SpecError, match="is wrong"):
        a_step_is_made()


def test_a_refused_message_is_a_fault_of_the_policy_that_made_it(install: Any) -> None:
    install()
    refusal = "worker 1, at iteration 3, refuses a message of worker 0: payload of 4 bytes"
    mine = catalogue.rejection_error("mine", 1, 0, "payload of 4 bytes", 3)
    assert isinstance(mine, ProgramError)
    assert refusal in str(mine)
    own = catalogue.rejection_error("topk", 1, 0, "payload of 4 bytes", 3)
    assert isinstance(own, ContractError)
    assert str(own) == f"policy topk: {refusal}"


@pytest.mark.parametrize("field", ["exchange.policy", "exchange.parameters"])
@pytest.mark.parametrize("last", ["import nosuchmodule", "POLICY = 3"])
def test_explain_continues_with_the_other_policies(
    install: Any, field: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(last=last)
    assert main(["explain", field]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "cannot be read: " in out
    assert out.index("\n  mine") < out.index("\n  none") < out.index("\n  twostep")
    assert main(["explain", "exchange.parameters", "--policy", "mine"]) > 0
    output = capsys.readouterr()
    assert "mine" in output.err
    assert not output.out

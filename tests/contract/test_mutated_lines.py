"""Contract: every exchange policy has a central line that `tools/mutate_policies.py` flips; it is
there, once, and so are the tests that must notice. What the tool says of tests that notice, that
do not, and that fail anyway.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from dlion_core.policies.catalogue import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate_policies.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    return tool


TOOL = _tool()
MUTATIONS = TOOL.CENTRAL_LINES


def test_every_policy_has_one() -> None:
    assert set(BUILT_IN) - {"none"} <= set(MUTATIONS)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_line_is_there(name: str) -> None:
    mutation = MUTATIONS[name]
    text = (ROOT / "worker" / mutation.module).read_text()
    assert text.count(mutation.before) == 1
    assert (ROOT / mutation.tests).is_file()


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("assert here.VALUE == 1", "caught by test_it"),
        ("assert here.VALUE", "NOT CAUGHT: pytest ended with 0"),
        (
            "assert here.VALUE == 3",
            "NOT JUDGED: pytest ends with 1 without the change, too (test_it)",
        ),
    ],
)
def test_only_tests_that_pass_before_can_catch(test: str, verdict: str, tmp_path: Path) -> None:
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "here.py").write_text("VALUE = 1\n")
    tests = tmp_path / "test_here.py"
    tests.write_text(f"from planted import here\n\n\ndef test_it():\n    {test}\n")
    mutation = TOOL.Mutation("planted/here.py", "VALUE = 1", "VALUE = 2", str(tests))
    unchanged: dict[str, str] = {}
    assert TOOL.evaluate(tmp_path, mutation, unchanged) == verdict
    assert list(unchanged) == [str(tests)]
    assert (package / "here.py").read_text() == "VALUE = 1\n"

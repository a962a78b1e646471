"""Every example of a docstring gives what it says. Left out: commands and manifests in docs/."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("api", "operator", "worker", "cli")
PROMPT = ">>> "


def modules_with_examples() -> dict[str, int]:
    """Names of modules, and how many examples each has."""
    found = {}
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            lines = path.read_text("utf-8").splitlines()
            if count := sum(line.lstrip().startswith(PROMPT) for line in lines):
                parts = path.relative_to(ROOT / source).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = count
    return found


EXAMPLES = modules_with_examples()


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_examples_of_a_module_give_what_they_say(name: str) -> None:
    module = importlib.import_module(name)
    runner, said = doctest.DocTestRunner(verbose=False), list[str]()
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=said.append)
    assert not said, "".join(said)
    assert runner.tries == EXAMPLES[name], "an example stands where doctest does not look"

"""Test that every example of a docstring gives its stated result.

Left out: commands and manifests in docs/.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("api", "operator", "worker", "cli")
PROMPT = ">>> "


def modules_with_examples() -> dict[str, int]:
    """Return the names of modules, and the number of examples in each."""
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
def test_the_examples_of_a_module_give_their_stated_results(name: str) -> None:
    module = importlib.import_module(name)
    runner, failures = doctest.DocTestRunner(verbose=False), list[str]()
    for test in doctest.DocTestFinder().find(module):
        runner.run(test, out=failures.append)
    assert not failures, "".join(failures)
    assert runner.tries == EXAMPLES[name], "doctest does not find an example"

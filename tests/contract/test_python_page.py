"""Tests of docs/python.md against the Python interface: the page has exactly its public names,
methods, keywords and fields.

Left out: their effect (tests/unit/cli/test_client_*.py); the fields of the manifest.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import dlion
from dlion import errors
from dlion_cli.cluster.connection_settings import ConnectionSettings

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text(encoding="utf-8")
METHODS = {
    name: method
    for name, method in inspect.getmembers(dlion.Client, inspect.isfunction)
    if not name.startswith("_")
}
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
_SPANS = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
WORDS = set(re.findall(r"[A-Za-z_]\w*", " ".join([*_SPANS, *BLOCKS])))
"""Every name in code."""


def documented() -> dict[str, set[str]]:
    """The methods of the list, with their keywords."""
    _, heading, rest = PAGE.partition("\n- `train(")
    listed = (heading + rest).partition("\n\n")[0]
    cells = re.findall(r"^- (`.*?`): ", listed, re.MULTILINE)
    calls = [call for cell in cells for call in re.findall(r"`(\w+)\(([^)]*)\)`", cell)]
    return {name: set(re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", given)) for name, given in calls}


@pytest.mark.parametrize("name", sorted({*dlion.__all__, *errors.__all__}))
def test_each_public_name_is_on_the_page(name: str) -> None:
    assert name in WORDS
    assert hasattr(dlion, name) or hasattr(errors, name)


def test_the_list_has_each_method_with_its_keywords() -> None:
    for name, given in documented().items():
        assert given == {*inspect.signature(METHODS[name]).parameters} - {"self"}, name
    assert documented().keys() == METHODS.keys()


def test_the_page_has_each_field_of_a_job_and_its_workers() -> None:
    (paragraph,) = (each for each in PAGE.split("\n\n") if each.startswith("A `Job` is"))
    named = set(re.findall(r"`(\w+)`", paragraph))
    fields = {each.name for of in (dlion.Job, dlion.JobWorker) for each in dataclasses.fields(of)}
    assert fields <= named
    assert {each for each in named if each.islower()} - fields <= {"exit_code", "has_ended"}


def test_the_constructors_options_are_on_the_page() -> None:
    parameters = {*inspect.signature(dlion.Client).parameters} - {"backend"}
    assert parameters <= WORDS
    settings = {each.name for each in dataclasses.fields(ConnectionSettings)}
    assert parameters == settings | {"root"}, "those of the commands"


@pytest.mark.parametrize("block", BLOCKS)
def test_code_of_the_page_uses_existing_names(block: str) -> None:
    """They are calls of `dlion` and of a client, with their keywords."""
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    owners = {"dlion": dlion, "client": dlion.Client}
    checked = 0
    for call in calls:
        function = call.func
        if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
            continue
        if (owner := owners.get(function.value.id)) is None:
            continue
        parameters = inspect.signature(getattr(owner, function.attr)).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            assert {word.arg for word in call.keywords} <= parameters.keys()
        checked += 1
    assert checked

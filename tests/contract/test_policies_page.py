"""Tests of docs/policies.md: it has a section for every published system, with its parameters and
defaults.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlion_api.document import shapes
from dlion_core.policies.catalogue import BUILT_IN
from dlion_core.policies.parameters import NoParameters

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"
OWN = {"dlion", "dlion-published", "full", "none"}  # docs/exchange.md has them


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def spelt(value: object) -> str:
    if value is None or value in ("", ()):
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def test_the_page_has_the_published_systems_in_alphabetical_order() -> None:
    assert list(sections()) == sorted(set(BUILT_IN) - OWN)


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - OWN))
def test_a_section_has_every_parameter_with_its_default(name: str) -> None:
    rows = dict(re.findall(r"^- `(\w+)` \(([^),]*)[^)]*\)", sections()[name], flags=re.MULTILINE))
    parameters = BUILT_IN[name].parameters
    assert parameters is not NoParameters or not rows
    declared = {field.name: field for field in shapes.shape_of(parameters).fields}
    assert rows.keys() == declared.keys()
    for field in declared.values():
        assert isinstance(field.shape, shapes.Scalar | shapes.List)
        assert rows[field.name] == spelt(field.declared.default), field.name


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - OWN))
def test_a_section_names_its_source(name: str) -> None:
    assert "Source: " in sections()[name]

"""The CRD's schema and the model accept and refuse the same manifests.

Proves: a table of more than a hundred documents is judged as it says by both, and our parser finds
the fault where it is; what a CEL rule refuses has that rule's message; documents changed at random
are judged alike; the examples are valid for both; the written defaults are the model's.
Leaves out: CEL itself (a real API server's business). How the schema is read: `manifest_schema`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import manifest_schema
from dlion_api.errors import Problem, SpecError
from dlion_api.spec import load_job
from manifest_table import ACCEPTED, CASES, REFUSED, Case, smallest

STRICT = manifest_schema.strict_validator()
MESSAGES = manifest_schema.messages(manifest_schema.openapi())
EXAMPLES = Path(__file__).parents[2] / "examples"


def problems(document: object) -> tuple[Problem, ...]:
    try:
        load_job(document)
    except SpecError as error:
        return error.problems
    return ()


def test_the_table_is_large_and_names_each_case_once() -> None:
    assert len(ACCEPTED) >= 30
    assert len(REFUSED) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_both_accept(case: Case) -> None:
    assert problems(case.document) == ()
    assert manifest_schema.accepts(STRICT, case.document)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_both_refuse_and_the_fault_is_where_it_is(case: Case) -> None:
    found = problems(case.document)
    assert [problem.path for problem in found] == [case.path]
    assert manifest_schema.accepts(STRICT, case.document) == (case.judge != "schema")
    assert (found[0].message in MESSAGES) == (case.judge == "rule")


@pytest.mark.parametrize(
    "path", [*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*/*.yaml")], ids=lambda path: path.stem
)
def test_examples_are_valid_for_both(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert problems(document) == ()
    assert manifest_schema.accepts(STRICT, document)


def test_defaults_in_the_schema_are_the_models() -> None:
    filled = load_job(smallest()).to_document()["spec"]
    written = manifest_schema.openapi()["properties"]["spec"]["properties"]
    for name, value in filled.items():
        if name not in smallest()["spec"]:
            assert written[name]["default"] == value, name


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.integers(-2, 20)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.floats(-1, 2)
    | st.text(max_size=5)
    | st.sampled_from(["digits", "plant-a", "a" * 40, "bySite", "1Gi", "-a", "a\n", "Secret"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    steps: list[str | int] = []
    if isinstance(value, dict | list):
        steps = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [path, *(place for step in steps for place in places(value[step], (*path, step)))]


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


@st.composite
def changed_documents(draw: st.DrawFn) -> Any:
    """A valid manifest, in full, with one to three things wrong or otherwise below `spec`."""
    case = draw(st.sampled_from(ACCEPTED))
    document = copy.deepcopy(load_job(case.document).to_document())
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(document["spec"], ("spec",))))
        parent, last = at(document, path[:-1]), path[-1]
        kind = draw(st.sampled_from(["replace", "remove", "add", "repeat", "similar"]))
        here = parent[last]
        if kind == "remove" and len(path) > 1:
            del parent[last]
        elif kind == "add" and isinstance(here, dict):
            here[draw(st.text(max_size=8))] = draw(values)
        elif kind == "repeat" and isinstance(here, list) and here:
            here.append(copy.deepcopy(here[0]))
        elif kind == "similar" and isinstance(here, str):
            parent[last] = here + draw(st.text(max_size=2))
        else:
            parent[last] = draw(values)
    return document


@given(changed_documents())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_documents_changed_at_random_are_judged_alike(document: Any) -> None:
    found = [p for p in problems(document) if p.message not in MESSAGES]
    assert (not found) == manifest_schema.accepts(STRICT, document), found


@given(values)
@settings(max_examples=200, deadline=None)
def test_anything_is_judged_alike_and_never_crashes(document: Any) -> None:
    assert bool(problems(document)) != manifest_schema.accepts(STRICT, document)

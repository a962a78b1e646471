"""Tests that the CRD's schema and the model accept and refuse the same manifests.

Both judge a table of more than a hundred documents as expected, and the parser names the place of
the fault. A document refused by a CEL rule gets that rule's message. Randomly changed documents are
judged equally. The examples are valid for both. The defaults in the schema are those of the model.

Left out: CEL, which needs a real API server. `manifest_schema` reads the schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

import manifest_schema
from dlion_api.errors import Problem, SpecError
from dlion_api.spec import load_job
from example_counts import examples
from manifest_strategies import changed_documents, values
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
def test_schema_and_model_accept(case: Case) -> None:
    assert problems(case.document) == ()
    assert manifest_schema.accepts(STRICT, case.document)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_schema_and_model_refuse_and_the_fault_has_its_place(case: Case) -> None:
    found = problems(case.document)
    assert [problem.path for problem in found] == [case.path]
    assert manifest_schema.accepts(STRICT, case.document) == (case.judge != "schema")
    assert (found[0].message in MESSAGES) == (case.judge == "rule")


@pytest.mark.parametrize(
    "path",
    [p for p in (*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("*/*.yaml")) if p.stem != "runtime"],
    ids=lambda path: path.stem,
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


@given(changed_documents())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_randomly_changed_documents_are_judged_equally(document: Any) -> None:
    found = [p for p in problems(document) if p.message not in MESSAGES]
    assert (not found) == manifest_schema.accepts(STRICT, document), found


@given(values)
@settings(max_examples=examples(200), deadline=None)
def test_any_value_is_judged_equally_and_never_crashes(document: Any) -> None:
    assert bool(problems(document)) != manifest_schema.accepts(STRICT, document)

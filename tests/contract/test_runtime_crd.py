"""Tests of the definition of DLionRuntime against its model, and of the page against both.

Model and schema accept and refuse the same specs, except for rules, which only the model has here.
The definition is namespaced, small and has the documented columns. docs/runtimes.md names every
field and shows the example.

Left out: a real API server (tests/cluster/test_runtimes).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dlion_api.document import Explanation, explain, parse
from dlion_api.errors import SpecError
from dlion_api.spec import Runtime
from manifest_schema import STRICT
from runtime_table import RUNTIME_CASES, RuntimeCase, runtime_document

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "dlionruntime.yaml"


def crd() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("case", RUNTIME_CASES, ids=lambda case: case.name)
def test_model_and_schema_judge_equally(case: RuntimeCase) -> None:
    document = runtime_document(case.spec)
    validator = STRICT(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    assert validator.is_valid(document) is (not case.blamed or case.by_rule)
    if not case.blamed:
        parse(Runtime, document)
        return
    with pytest.raises(SpecError) as error:
        parse(Runtime, document)
    assert any(problem.path.startswith(case.blamed) for problem in error.value.problems)


def test_the_example_is_valid_and_equals_that_of_the_page() -> None:
    text = (ROOT / "examples" / "runtime.yaml").read_text()
    document = yaml.safe_load(text)
    parse(Runtime, document)
    assert STRICT(crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]).is_valid(document)
    shown = [yaml.safe_load(block.partition("```")[0]) for block in
             (ROOT / "docs" / "runtimes.md").read_text().split("```yaml\n")[1:]]  # fmt: skip
    assert document in shown


def test_the_definition_is_of_a_namespaced_kind() -> None:
    spec = crd()["spec"]
    assert (spec["scope"], spec["names"]["shortNames"]) == ("Namespaced", ["dlr"])
    assert CRD.stat().st_size < 10_000
    (version,) = spec["versions"]
    properties = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for column in version["additionalPrinterColumns"]:
        path = column["jsonPath"].split(".")[1:]
        assert path[0] == "metadata" or path[1] in properties


def test_the_page_names_every_field() -> None:
    page = (ROOT / "docs" / "runtimes.md").read_text()

    def leaves(node: Explanation) -> list[Explanation]:
        return [each for child in node.children for each in leaves(child)] or [node]

    for each in leaves(explain(Runtime, "spec")):
        assert f"`{each.path.removeprefix('spec.')}`" in page, each.path

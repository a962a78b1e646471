"""Tests of the CRD: it is generated from the present model, and meets the requirements of API
servers.

The file is up to date, structural, bounded everywhere and under 200 KB. Names, columns and the
default of the status are as documented. A pod's hostname and labels stay within 63 characters.

Left out: checks of an API server only (the cost of CEL rules).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import manifest_schema
from dlion_api import bounds
from dlion_api.spec import load_job
from manifest_schema import crd, nodes, openapi
from manifest_table import smallest

ROOT = Path(__file__).parents[2]
NODES = list(nodes(openapi()))


@pytest.mark.parametrize(
    "tool",
    [
        "generate_crd.py",
        "generate_manifest_reference.py",
        "generate_command_reference.py",
        "generate_dashboards.py",
        "generate_chart_readme.py",
    ],
)
def test_generated_files_are_up_to_date(tool: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    assert subprocess.run(command, check=False, timeout=300).returncode == 0


def test_a_changed_generated_file_is_found(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from generated_files import write_or_compare;"
        "from pathlib import Path; path = Path(sys.argv[2]);"
        "codes = [write_or_compare({path: 'a'}, check=check) for check in (True, False, True)];"
        "path.write_text('b'); print(codes, write_or_compare({path: 'a'}, check=True))"
    )
    arguments = [str(ROOT / "tools"), str(tmp_path / "folder" / "page.md")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[1, 0, 0] 1\n"


def test_the_definition_is_small_and_has_its_columns() -> None:
    assert manifest_schema.CRD.stat().st_size < 200_000
    spec = crd()["spec"]
    version = spec["versions"][0]
    assert spec["names"]["shortNames"] == ["dlj"]
    assert version["subresources"] == {"status": {}}
    columns = {c["name"]: c.get("priority", 0) for c in version["additionalPrinterColumns"]}
    assert [name for name, priority in columns.items() if priority == 0] == [
        "State", "Progress", "Sites", "Workers", "Steps/s", "Age"
    ]  # fmt: skip
    assert [name for name, priority in columns.items() if priority == 1] == [
        "Run", "Policy", "Loss", "Accuracy", "ETA-Seconds", "Reason"
    ]  # fmt: skip
    assert openapi()["properties"]["status"]["default"] == {"observedGeneration": -1}


def test_every_column_shows_an_existing_field() -> None:
    paths = {path for path, _ in NODES}
    for column in crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = re.sub(r"\[\?\(@\.([a-z]+)==.*\)\]", r"[].\1 []", column["jsonPath"])
        chosen_by, _, rest = path.removeprefix(".").partition(" []")
        assert chosen_by in paths or chosen_by == "metadata.creationTimestamp"
        if rest:
            assert chosen_by.rpartition(".")[0] + rest in paths


def test_the_schema_is_structural() -> None:
    """A structural schema has a type at every node, and no forbidden keyword."""
    for path, node in NODES:
        either = node.get("x-kubernetes-int-or-string", False)
        assert either or isinstance(node.get("type"), str), path
        assert not {"$ref", "definitions", "not", "oneOf", "allOf", "uniqueItems"} & set(node), path
        assert ("anyOf" in node) == either, path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert (node.get("type") == "array") == ("items" in node), path


def test_everything_is_bounded() -> None:
    for path, node in NODES:
        if path in ("apiVersion", "kind"):
            continue
        match node.get("type"):
            case "string":
                assert "maxLength" in node or "enum" in node, path
            case "array":
                assert "maxItems" in node, path
            case "integer":
                assert {"minimum", "maximum"} <= set(node), path
            case "object" if "additionalProperties" in node:
                assert "maxProperties" in node, path


def test_only_objects_with_another_validation_keep_unknown_fields() -> None:
    free = [path for path, node in NODES if "x-kubernetes-preserve-unknown-fields" in node]
    assert free == [
        "spec.sites[].groups[].podTemplate", "spec.exchange.parameters", "spec.podTemplate"
    ]  # fmt: skip


def test_lists_of_named_objects_are_maps_with_required_keys() -> None:
    maps = {
        path: node["x-kubernetes-list-map-keys"]
        for path, node in NODES
        if node.get("x-kubernetes-list-type") == "map"
    }
    assert maps["spec.sites"] == maps["spec.sites[].groups"] == ["name"]
    assert maps["status.conditions"] == ["type"]
    by_path = dict(NODES)
    for path, keys in maps.items():
        assert set(keys) <= set(by_path[f"{path}[]"]["required"]), path


def test_patterns_match_whole_strings_and_are_equal_in_go() -> None:
    for path, node in NODES:
        pattern = node.get("pattern", "^$")
        assert pattern.startswith("^"), path
        assert pattern.endswith("$"), path
        assert not re.search(r"\\[dwsb]|\(\?[=!<P]", pattern), path


def test_every_rule_has_a_message_and_names_an_existing_field() -> None:
    paths = {path for path, _ in NODES}
    rules = [(path, r) for path, node in NODES for r in node.get("x-kubernetes-validations", ())]
    assert len(rules) >= 25
    for path, rule in rules:
        assert set(rule) <= {"rule", "message", "fieldPath"}
        assert f"{path}{rule.get('fieldPath', '')}".lstrip(".") in paths


def test_every_default_is_valid_for_its_field() -> None:
    for path, node in NODES:
        if "default" in node and path != "status":
            assert manifest_schema.STRICT(node).is_valid(node["default"]), path


def test_the_longest_names_leave_room_in_hostnames_and_certificates() -> None:
    document = smallest()
    document["metadata"] = {"name": "j" * bounds.JOB_NAME_LENGTH, "namespace": "n" * 63}
    group = {"name": "g" * bounds.GROUP_NAME_LENGTH, "workers": 100}
    document["spec"]["runId"] = "r" * bounds.RUN_ID_LENGTH
    document["spec"]["sites"] = [{"name": "s" * bounds.SITE_NAME_LENGTH, "groups": [group]}]
    job = load_job(document)
    hostname = f"{job.metadata.name}-{group['name']}-{'0' * 6}-{bounds.MAX_WORKERS_PER_GROUP - 1}"
    assert len(hostname) <= 63
    dns = job.workers()[-1].dns_name(job.key)
    assert len(dns) <= 253
    assert max(len(label) for label in dns.split(".")) <= 63

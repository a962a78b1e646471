"""Test manifest files: lines, hostile YAML, and `--set`.

- Paths have the correct lines. Text has the meaning that kubectl gives it. Duplicate keys, alias
  bombs, depth, size, long paths, tags and several documents are refused with a line.
- `--set` changes a copy or reports what is wrong with the path. Problems of a policy appear with
  all others. `dlion run` refuses an authority that only a cluster has.

Left out: the valid values (tests/contract, tests/unit/api).
"""

from __future__ import annotations

import contextlib
import math
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.errors import DataError, SpecError
from dlion_api.spec import load_job
from dlion_cli.inputs.manifests import (
    apply_set,
    load_manifest,
    read_document,
    read_documents,
    reject_cluster_authority,
)
from dlion_environments.loading import load_environment
from dlion_environments.yaml_text import (
    MAX_BYTES,
    parse_any_documents,
    parse_documents,
    to_yaml,
)
from example_counts import examples
from local_run import job_document

NESTED = """\
# a comment
spec:
  sites:
    - name: a
      groups:
      - {name: g,
         workers: 3}
    - name: b
  trainer:
    seed: 1
"""


def value_of(text: str) -> Any:
    return parse_any_documents(text, source="t")[0].value


def refusal(text: str | bytes) -> str:
    with pytest.raises(SpecError) as caught:
        parse_any_documents(text, source="t")
    return str(caught.value.problems[0])


def test_every_path_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(NESTED)
    document, lines = read_document(path)
    assert document == yaml.safe_load(NESTED)
    expected = {
        "spec": 2,
        "spec.sites": 3,
        "spec.sites[0]": 4,
        "spec.sites[0].name": 4,
        "spec.sites[0].groups[0].workers": 7,
        "spec.sites[1]": 8,
        "spec.trainer.seed": 10,
    }
    assert {path: lines[path] for path in expected} == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("2026-01-31", "2026-01-31"), ("12:30", "12:30"), ("on", True),
        ("No", False), ("~", None), ("010", 8), ("0x1F", 31), ("-5", -5), ("+7", 7), ("089", 89.0),
        ("'1'", "1"), ('"yes"', "yes"), ("!!str 1", "1"), (".5", 0.5), (".inf", math.inf),
        ("9" * 5000, math.inf), ("1_000", "1_000"), ("|\n  x\n", "x\n"), ("=", "="), ("y", "y"),
    ],
)  # fmt: skip
def test_scalars_have_the_meaning_that_kubectl_gives_them(text: str, value: Any) -> None:
    assert value_of(f"a: {text}") == {"a": value}
    assert type(value_of(f"a: {text}")["a"]) is type(value)


@pytest.mark.parametrize(
    "text", ["1e3", "08", "0o7", "on", "", "~", "-x", "y", "two\nlines", "é 😀", "1_2e3", "+_0"]
)
def test_text_that_is_written_is_read_again(text: str) -> None:
    """By `kubectl` as well: it has more truth values, and numbers with underscores."""
    written = to_yaml({"runId": text, text: [text]})
    assert value_of(written) == {"runId": text, text: [text]}
    assert not any(f"runId: {each}\n" in written for each in ("y", "1_2e3", "+_0"))


def test_aliases_and_merges_are_expanded() -> None:
    text = "a: &x {p: 1, q: 2}\nb: *x\nc: {<<: *x, q: 3}\n"
    assert value_of(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: a: appears twice, first in line 1"),
        ("a: [1\nb: 2", "line 2: (document): is not YAML"),
        ("é: 1\nb:\n\tc: 2\n", "line 3: (document): is not YAML: a tab indents the line"),
        ("a: *unknown", "line 1: a: *unknown is not known"),
        ("a: &x [*x]", "line 1: a[0]: *x is not known"),
        ("a: !!python/object/apply:os.system [x]", "line 1: a: has the tag"),
        ("a: !thing x", "line 1: a: has the tag"),
        ("? [a]\n: 1", "line 1: (document): has a key that is not a string"),
        ("a: {<<: 3}", "line 1: a: << merges mappings only"),
        ("a: \x07", "is not YAML"),
        (b"a: \xff\xfe", "is not YAML"),
        ("a: \udcff", "is not YAML"),  # an argument of a terminal that is not UTF-8
        ("[" * 5000, "line 1: (document): is nested deeper than 64 levels"),
        ("a: " + "x" * 2**20, "is too large; allowed: up to 1048576 bytes"),
    ],
)
def test_invalid_text_is_refused_with_its_line(text: str | bytes, message: str) -> None:
    assert message in refusal(text)


def test_all_duplicate_keys_are_reported_with_the_final_error() -> None:
    with pytest.raises(SpecError) as caught:
        parse_any_documents("a: 1\na: 2\nb:\n  c: 1\n  c: 2\nb: *x\n", source="t")
    assert [(problem.line, problem.path) for problem in caught.value.problems] == [
        (2, "a"), (5, "b.c"), (6, "b"), (6, "b"),
    ]  # fmt: skip
    with pytest.raises(SpecError) as caught:
        parse_any_documents("a: 1\n" * 10_000, source="t")
    assert len(caught.value.problems) == 101


def test_an_alias_bomb_is_refused_immediately() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    began = time.process_time()
    assert "unfolds to more than 100000 values" in refusal("\n".join(["l0: &l0 x", *levels]))
    assert time.process_time() - began < 2


def test_aliases_do_not_nest_deeper_than_a_text_may() -> None:
    """Or else to copy the document, as `--set` does, exceeds Python's stack."""
    levels = [f"l{i}: &l{i} {'[' * 40}*l{i - 1}{']' * 40}" for i in range(1, 40)]
    assert "is nested deeper than 64 levels" in refusal("\n".join(["l0: &l0 x", *levels]))
    flat = [f"l{i}: &l{i} [*l{i - 1}]" for i in range(1, 64)]
    assert apply_set(value_of("\n".join(["l0: &l0 x", *flat])), [])


def nested(keys: int, inner: str) -> str:
    """Return nested mappings with this many keys of 1,000 characters, and a value in the last
    one.
    """
    levels = "".join(f"{' ' * level}{'k' * 1000}{level}:\n" for level in range(keys))
    return f"name: x\n{levels}{' ' * keys}{inner}\n"


@pytest.mark.parametrize(
    "text",
    [
        nested(60, f"[{'0,' * 16_000}0]"),
        nested(60, f"[{'[],' * 16_000}[]]"),
        nested(60, f"{{{', '.join(f'k{n}: 0' for n in range(16_000))}}}"),
        nested(60, f"[{'*a , ' * 16_000}0]").replace("name: x", "name: &a x"),
        "---\n".join([nested(30, "[" + "0," * 1000 + "0]")] * 2),
    ],
)
def test_long_paths_of_many_values_are_refused_before_they_fill_memory(
    text: str, tmp_path: Path
) -> None:
    """A path is kept whole for every value: without a limit these take 140 MB to a gigabyte."""
    (tmp_path / "some.yaml").write_text(text)
    message = "has keys whose paths come to more than 16777216 characters. Give shorter keys"
    for read in (read_documents, load_environment):
        tracemalloc.start()
        with pytest.raises(SpecError, match=message):
            read(tmp_path / "some.yaml")
        _, max_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert max_bytes < 100_000_000


def test_a_manifest_of_the_full_size_is_read() -> None:
    site = "    - {name: site-%036d, groups: [{name: a, workers: 3}, {name: b, workers: 4}]}\n"
    text = "spec:\n  sites:\n" + "".join(site % number for number in range(9_000))
    assert 0.9 * MAX_BYTES < len(text) < MAX_BYTES
    (document,) = parse_any_documents(text, source="t")
    assert document.lines["spec.sites[8999].groups[1].workers"] == 9_002


@given(st.text(max_size=60) | st.text("[]{}&*!|>-:,'\"# \nab1", max_size=60))
@settings(max_examples=examples(300), deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SpecError):
        parse_any_documents(text, source="t")


def test_several_documents_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("a: 1\n---\n---\nb: 2\n")
    assert [text.value for text in read_documents(path)] == [{"a": 1}, {"b": 2}]
    with pytest.raises(SpecError, match="there are several documents"):
        read_document(path)


def test_no_file_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_document(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(SpecError, match="is empty"):
        read_document(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("spec.trainer.seed=7", ("spec", "trainer", "seed"), 7),
        ("trainer.seed=7", ("spec", "trainer", "seed"), 7),
        ("trainer.stop.targetAccuracy=1e-3", ("spec", "trainer", "stop", "targetAccuracy"), 1e-3),
        ("sites[0].groups[0].workers=5", ("spec", "sites", 0, "groups", 0, "workers"), 5),
        ("sites[2].name=c", ("spec", "sites", 2, "name"), "c"),
        ("sites[1].groups[0].name=g", ("spec", "sites", 1, "groups", 0, "name"), "g"),
        ("exchange={policy: none}", ("spec", "exchange"), {"policy": "none"}),
        ("metadata.name=x", ("metadata", "name"), "x"),
        ("trainer.startFrom=a=b", ("spec", "trainer", "startFrom"), "a=b"),
    ],
)  # fmt: skip
def test_set_puts_a_value_at_a_path(
    assignment: str, path: tuple[str | int, ...], value: Any
) -> None:
    document = yaml.safe_load(NESTED)
    place = apply_set(document, [assignment])
    for step in path:
        place = place[step]  # type: ignore[index]
    assert place == value
    assert document == yaml.safe_load(NESTED)


@pytest.mark.parametrize("alias", ["groups: *g", "<<: *a"])
def test_set_at_an_anchor_leaves_its_aliases(alias: str) -> None:
    text = f"spec:\n  sites:\n  - &a\n    groups: &g [{{workers: 2}}]\n  - {alias}\n"
    (document,) = parse_any_documents(text, source="t")
    changed = apply_set(document.value, ["sites[0].groups[0].workers=5"])
    assert [site["groups"][0]["workers"] for site in changed["spec"]["sites"]] == [5, 2]


def test_set_at_an_anchor_of_a_set_value_leaves_its_aliases() -> None:
    changed = apply_set({"spec": {}}, ["sites=[&a {name: a}, *a]", "sites[1].name=b"])
    assert changed["spec"]["sites"] == [{"name": "a"}, {"name": "b"}]


def test_set_without_a_value_removes_the_field() -> None:
    assert apply_set({"spec": {"suspend": True}}, ["suspend="]) == {"spec": {}}
    heat = {"spec": {"nodePolicies": {"heat": {"minShare": 0.5, "thresholdCelsius": 70}}}}
    assert apply_set(heat, ["nodePolicies.heat.minShare="]) == {
        "spec": {"nodePolicies": {"heat": {"thresholdCelsius": 70}}}
    }


@pytest.mark.parametrize("path", ["trainer.privacy.clip", "nodePolicies.heat.minShare", "a[0].b"])
def test_set_without_a_value_adds_nothing_where_there_is_no_field(path: str) -> None:
    """An empty section would request what the manifest does not: noise, or a heat budget."""
    document: dict[str, Any] = {"spec": {"trainer": {"seed": 7}, "nodePolicies": None}}
    assert apply_set(document, [f"{path}="]) == document


@pytest.mark.parametrize(
    "tls",
    [
        {"mode": "Secret", "secretName": "plant-ca"},
        {"mode": "CertManager", "issuerName": "example-pki"},
    ],
)
def test_the_authority_of_a_cluster_is_refused_without_a_cluster(tls: dict[str, str]) -> None:
    document = job_document(1, tls=tls)
    with pytest.raises(SpecError) as caught:
        reject_cluster_authority(load_job(document), "job.yaml")
    (problem,) = caught.value.problems
    assert problem.path == "spec.tls.mode"
    # The advice works.
    advised = [part for part in problem.advice.split() if part.startswith("tls.")]
    reject_cluster_authority(load_job(apply_set(document, advised)), "job.yaml")


def test_set_without_a_value_removes_the_item_of_a_list() -> None:
    document: dict[str, Any] = {"spec": {"sites": [{"name": "a"}, {"name": "b"}]}}
    assert apply_set(document, ["sites[0]="]) == {"spec": {"sites": [{"name": "b"}]}}


@pytest.mark.parametrize("path", ["sites[2]", "sites[2].name", "sites[2].groups[0].workers"])
def test_set_without_a_value_refuses_an_item_that_a_list_lacks(path: str) -> None:
    document: dict[str, Any] = {"spec": {"sites": [{"name": "a"}, {"name": "b"}]}}
    with pytest.raises(SpecError, match="index 2 is out of range: the list has 2 items"):
        apply_set(document, [f"{path}="])


def test_set_reports_all_problems() -> None:
    bad = ["", "x", "sites[9].name=a", "sites.name=a", "trainer.seed.x=1", "a..b=1", "[0]=1", "=1",
           "trainer[0]=1", "a={", "a=\udcff", "trainer.seed=1\n---\n2"]  # fmt: skip
    with pytest.raises(SpecError) as caught:
        apply_set(yaml.safe_load(NESTED), bad)
    messages = {problem.path: problem.message for problem in caught.value.problems}
    assert list(messages) == ["''", *bad[1:]]
    assert "out of range: the list has 2" in messages["sites[9].name=a"]
    assert "is a list" in messages["sites.name=a"]
    assert "is a single value" in messages["trainer.seed.x=1"]
    assert "not YAML" in messages["a={"]
    assert "not YAML" in messages["a=\udcff"]
    assert "several YAML documents" in messages["trainer.seed=1\n---\n2"]


@pytest.mark.parametrize(
    ("text", "advice"), [("a: @x\n", "in quotes"), ("a: [1\n", "Check the indentation")]
)
def test_advice_on_yaml_matches_the_problem(text: str, advice: str) -> None:
    with pytest.raises(SpecError, match=advice):
        parse_documents(text, source="job.yaml")


@pytest.mark.parametrize(("text", "run_id"), [("2", "2"), ("007", "007"), ('"3"', "3"), ("b", "b")])
def test_a_run_name_that_looks_like_a_number_is_a_string(text: str, run_id: str) -> None:
    assert apply_set({}, [f"runId={text}"]) == {"spec": {"runId": run_id}}


@pytest.mark.parametrize(
    ("exchange", "path"),
    [
        ({"policy": "dlyon"}, "spec.exchange.policy"),
        ({"policy": "ako", "parameters": {"foo": 1}}, "spec.exchange.parameters.foo"),
        ({"policy": "ako", "parameters": [1]}, "spec.exchange.parameters"),
        ({"parameters": {"foo": 1}}, "spec.exchange.parameters.foo"),
    ],
)
def test_problems_of_a_policy_are_reported_with_all_others(
    exchange: dict[str, Any], path: str
) -> None:
    document = job_document(3, exchange=exchange, batching={"policy": "odd"})
    with pytest.raises(SpecError) as caught:
        load_manifest(document, source="t", lines=None)
    paths = [problem.path for problem in caught.value.problems]
    assert sorted(paths) == sorted({"spec.batching.policy", path})


@pytest.mark.parametrize("exchange", [None, [], "x", {"policy": 7}, {"policy": ["ako"]}])
def test_an_invalid_exchange_has_no_problems_of_a_policy(exchange: object) -> None:
    document = {**job_document(3), "spec": {"exchange": exchange}}
    with pytest.raises(SpecError) as caught:
        load_manifest(document, source="t", lines=None)
    assert len({problem.path for problem in caught.value.problems}) == len(caught.value.problems)

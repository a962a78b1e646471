"""Test the loading of environment files.

- Every published environment loads, with the values of the published table.
- All problems of a faulty file are reported together. The error for a wrong name lists the existing
  names.
- Scalars have the same meaning as in a manifest. Text that is not YAML is reported with file and
  line.

Left out: the resulting plans (test_planning), their application (tests/local).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_environments.loading import environment_names, load_environment
from dlion_environments.model import Environment

ROOT = Path(__file__).parents[3]
KEPT = [*ROOT.glob("environments/*.yaml"), *ROOT.glob("benchmarks/paper/environments/*.yaml")]
PUBLISHED = {
    "homo-a": ([24] * 6, [1000] * 6),
    "homo-b": ([24] * 6, [50] * 6),
    "hetero-cpu-a": ([24, 24, 12, 12, 4, 4], [1000] * 6),
    "hetero-net-a": ([24] * 6, [50, 50, 35, 35, 20, 20]),
    "hetero-sys-a": ([24, 24, 12, 12, 4, 4], [50, 50, 35, 35, 20, 20]),
    "hetero-sys-b": ([24, 24, 12, 12, 4, 4], [20, 20, 35, 35, 50, 50]),
    "dynamic-sys-a": ([24, 24, 12, 12, 4, 4], [50, 50, 35, 35, 20, 20]),
    "three-low-one-high": ([6, 6, 6, 24], [100] * 4),
    "gpu-a": ([24] * 6, [1000] * 6),
}
WITH_SITES = {
    "two-clouds": ([3, 1], 1000, 20, 10),
    "two-clouds-hetero": ([3, 1], 1000, 20, 10),
    "intercontinental": ([2, 2, 2], 1000, 50, 39),
    "quickstart": ([3, 1], 100, 20, 0),
    "fanless": ([3, 1], 100, 20, 10),
    "shared": ([3, 1], 100, 20, 10),
    "sensors": ([1, 3], 100, 1, 0),
}
MOVING = {"convoys"}
"""Their links follow tracks (test_radio.py)."""


def test_the_files_are_those_of_the_table_and_the_quick_start() -> None:
    assert set(environment_names()) == PUBLISHED.keys() | WITH_SITES.keys() | MOVING


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_published_environment_has_the_tables_values(name: str) -> None:
    environment = load_environment(name)
    machines = [machine for machine in environment.workers for _ in range(machine.count)]
    assert environment.name == name
    assert ([m.cores for m in machines], [m.mbit_per_s for m in machines]) == PUBLISHED[name]
    assert environment.link_shape == "sharedUplink"


@pytest.mark.parametrize("name", sorted(WITH_SITES))
def test_an_environment_with_sites_has_the_tables_values(name: str) -> None:
    environment = load_environment(name)
    assert environment.inside_sites is not None
    assert environment.between_sites is not None
    assert (
        [site.workers for site in environment.sites],
        environment.inside_sites.mbit_per_s,
        environment.between_sites.mbit_per_s,
        environment.between_sites.latency_ms,
    ) == WITH_SITES[name]


@pytest.mark.parametrize("path", [str(path.relative_to(ROOT)) for path in sorted(KEPT)])
def test_the_reader_of_kept_files_agrees_with_plain_yaml(path: str) -> None:
    text = (ROOT / path).read_text("utf-8")
    assert load_environment(ROOT / path) == parse(Environment, yaml.safe_load(text))


@pytest.mark.parametrize(
    ("word", "value"), [("1e0", 1.0), ("010", 8.0), ("0x10", 16.0), ("2.5E+1", 25.0)]
)
def test_numbers_have_the_same_meaning_as_in_a_manifest(
    tmp_path: Path, word: str, value: float
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nworkers: [{{cores: {word}}}]\n")
    assert load_environment(path).workers[0].cores == value


@pytest.mark.parametrize("word", ["1:30", "1_0"])
def test_numbers_of_older_yaml_are_refused(tmp_path: Path, word: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nworkers:\n  - {{cores: 1, mbitPerS: {word}}}\n")
    with pytest.raises(SpecError) as caught:
        load_environment(path)
    assert str(caught.value) == (
        f"{path}: 1 problem:\n  line 3: workers[0].mbitPerS: must be a number "
        f'(given: "{word}"); allowed: above 0, at most 1000000'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: open\nworkers:\n  - {cores: 2\n", "line 4: (document): is not YAML: did not find"),
        ("name: a\nworkers: [{cores: 2}]\n---\nname: b\n", "line 3: (document): there are several"),
        ("# nothing\n", "(document): is empty"),
    ],
)
def test_anything_but_one_document_is_reported_with_file_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_environment(path)
    assert str(caught.value).startswith(f"{path}: 1 problem:\n  {message}")


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nworkers: [{count: 2, cores: 1, uplinkMbitPerS: 5}]\n")
    assert load_environment(path).workers[0].uplink_mbit_per_s == 5


def test_all_problems_of_a_file_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: Bad\nworkers: [{cores: -1, mbitPerS: fast}]\nlinkshape: perPeer\n"
        "changes: [{at: {fraction: 0.5, seconds: 3}}]\n"
    )
    with pytest.raises(SpecError) as caught:
        load_environment(path)
    paths = {problem.path for problem in caught.value.problems}
    assert {"name", "workers[0].cores", "workers[0].mbitPerS", "linkshape"} <= paths
    assert any(problem.path.startswith("changes[0].at") for problem in caught.value.problems)


@pytest.mark.parametrize(
    "link",
    [
        {}, {"workers": [1]}, {"workers": [0, 1, 2]}, {"workers": [1, 1]}, {"workers": [0, "b"]},
        {"sites": ["a"]}, {"sites": ["a", 2]}, {"sites": ["a", "b"], "workers": [0, 1]}, [0, 1],
    ],
)  # fmt: skip
def test_a_cut_link_has_two_ends_of_one_kind(tmp_path: Path, link: object) -> None:
    path = tmp_path / "bad.yaml"
    change = {"at": {"seconds": 1}, "cutLinks": [link]}
    text = {"name": "bad", "workers": [{"count": 3, "cores": 1}], "changes": [change]}
    path.write_text(yaml.safe_dump(text))
    with pytest.raises(SpecError) as caught:
        load_environment(path)
    assert all(p.path.startswith("changes[0].cutLinks[0]") for p in caught.value.problems)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("Hetero-sys-Z", r"Did you mean hetero-sys-\w\? Give one of these names"),
        ("no/such/file.yaml", "cannot be read"),
    ],
)
def test_the_error_for_a_wrong_name_has_advice(given: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_environment(given)


@pytest.mark.parametrize(
    "data",
    [
        b"a: [", b"\xff\xfe", b"x" * 300_000, b"[" * 800, b"name: 2026-13-45", b"name: !!int x",
        b"name: !!bool x", b"name: !!timestamp x",
    ],
)  # fmt: skip
def test_a_document_that_is_not_an_environment_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(data)
    with pytest.raises(SpecError):
        load_environment(path)


def test_a_duplicate_key_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(
        "name: twice\n"
        "workers:\n"
        "  - {count: 2, cores: 1, cores: 4}\n"
        "betweenSites: {mbitPerS: 10}\n"
        "betweenSites:\n"
        "  mbitPerS: 1000\n"
    )
    with pytest.raises(SpecError, match=r"twice\.yaml") as caught:
        load_environment(path)
    assert [(problem.path, problem.line) for problem in caught.value.problems] == [
        ("workers[0].cores", 3),
        ("betweenSites", 5),
    ]
    assert "appears twice, first in line 4" in str(caught.value)


def test_mappings_may_be_merged_and_repeated_by_alias(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "name: merged\nworkers:\n  - &one {cores: 1, mbitPerS: 5}\n  - *one\n"
        "  - {<<: *one, cores: 2}\n"
    )
    found = load_environment(path)
    assert [(m.cores, m.mbit_per_s) for m in found.workers] == [(1, 5), (1, 5), (2, 5)]
    assert [found.lines[f"workers[{index}]"] for index in range(3)] == [3, 4, 5]

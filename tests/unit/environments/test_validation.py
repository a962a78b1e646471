"""Test the contradictions within an environment file.

- They are reported together when the file is read, each with its line, also if other fields are out
  of bounds. A field that cannot be read causes no second report.
- Times are compared as far as no run's length is needed. A naive search over lengths gives the
  same.

Left out: the effect of a job's own length (test_planning), the message of each refusal
(test_planning, test_happenings), the command line (tests/unit/cli).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.validation import time_orders
from example_counts import examples

if TYPE_CHECKING:
    from pathlib import Path

BROKEN = """\
name: broken
workers: [{count: 4, cores: 1}]
sites: [{name: a, workers: 3}, {name: b, workers: 1}]
changes:
  - {at: {seconds: 60}, cutSites: [zz]}
  - {at: {seconds: 50}, cutWorkers: [9]}
  - {at: {seconds: 70}, permutation: [3, 0, 1, 7]}
  - {at: {seconds: 80}, cores: [1, 2]}
  - {at: {seconds: 90}, mbitPerS: [1]}
  - {at: {seconds: 95}, cutLinks: [{workers: [0, 8]}]}
  - {at: {seconds: 96}, cutLinks: [{sites: [a, q]}]}
stragglers:
  - {workers: [9], slowdown: 2}
  - {slowdown: 2, begins: {seconds: 9}, ends: {seconds: 5}}
absences:
  - {worker: 1, leaves: {fraction: 0.5}, comes: {fraction: 0.25}}
  - {worker: 77, leaves: {seconds: 5}}
"""
EXPECTED = {
    (5, "changes[0].cutSites"), (6, "changes[1].at"), (6, "changes[1].cutWorkers"),
    (7, "changes[2].permutation"), (8, "changes[3].cores"), (9, "changes[4].mbitPerS"),
    (10, "changes[5].cutLinks[0].workers"), (11, "changes[6].cutLinks[0].sites"),
    (13, "stragglers[0].workers"), (14, "stragglers[1].ends"), (16, "absences[0].comes"),
    (17, "absences[1].worker"),
}  # fmt: skip


def problems_of(path: Path, text: str) -> set[tuple[int | None, str]]:
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_environment(path)
    return {(problem.line, problem.path) for problem in caught.value.problems}


def environment(**fields: Any) -> Environment:
    return parse(Environment, {"name": "test", "workers": [{"count": 4, "cores": 1}], **fields})


def refused(**fields: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        environment(**fields)
    return [str(problem) for problem in caught.value.problems]


def test_all_contradictions_of_a_file_are_reported_with_their_lines(tmp_path: Path) -> None:
    assert problems_of(tmp_path / "bad.yaml", BROKEN) == EXPECTED


@pytest.mark.parametrize(
    ("right", "wrong", "also"),
    [
        ("{count: 4, cores: 1}", "{count: 4, cores: 0}", (2, "workers[0].cores")),
        ("name: broken", "name: BROKEN", (1, "name")),
        ("slowdown: 2}\n  - {slow", "slowdown: 0}\n  - {slow", (13, "stragglers[0].slowdown")),
        ("cutWorkers: [9]", "cutWorkers: [9], oops: 1", (6, "changes[1].oops")),
        ("workers: 1}]", "workers: 5}]", (3, "sites")),
    ],
)
def test_a_field_out_of_bounds_hides_no_contradiction(
    tmp_path: Path, right: str, wrong: str, also: tuple[int, str]
) -> None:
    text = BROKEN.replace(right, wrong)
    assert text != BROKEN
    assert problems_of(tmp_path / "bad.yaml", text) == EXPECTED | {also}


@pytest.mark.parametrize(
    ("right", "wrong", "instead"),
    [
        ("cores: [1, 2]", "cores: [1, 0]", {(8, "changes[3].cores[1]")}),
        ("permutation: [3, 0, 1, 7]", "permutation: 3", {(7, "changes[2].permutation")}),
        ("seconds: 50}", "seconds: 50, fraction: 0.1}", {(6, "changes[1].at")}),
        ("worker: 77", "worker: -1", {(17, "absences[1].worker")}),
        ("- {at: {seconds: 80}, cores: [1, 2]}", "- 7", {(8, "changes[3]")}),
    ],
)
def test_an_unreadable_field_causes_no_second_report(
    tmp_path: Path, right: str, wrong: str, instead: set[tuple[int, str]]
) -> None:
    (line,) = {line for line, _ in instead}
    others = {one for one in EXPECTED if one[0] != line or one[1] == "changes[1].cutWorkers"}
    assert problems_of(tmp_path / "bad.yaml", BROKEN.replace(right, wrong)) == others | instead


def test_ranks_are_not_checked_without_a_known_number_of_workers() -> None:
    messages = refused(
        workers=[{"count": 0, "cores": 1}],
        changes=[{"at": {"seconds": 1}, "cutWorkers": [9], "cutSites": ["b"]}],
    )
    assert [text.partition(":")[0] for text in messages] == [
        "workers[0].count",
        "changes[0].cutSites",
    ]


@pytest.mark.parametrize(
    "times",
    [
        [{"fraction": 0.5}, {"fraction": 0.25}],
        [{"seconds": 60}, {"fraction": 0.5}, {"seconds": 50}],
        [{"fraction": 0.5}, {"seconds": 0}],  # no run is that short
        [{"fraction": 0.1}, {"seconds": 10}, {"seconds": 60}, {"fraction": 0.5}],  # ≤ 100, ≥ 120
    ],
)
def test_times_that_no_run_has_in_order_are_refused(times: list[dict[str, float]]) -> None:
    assert len(refused(changes=[{"at": at} for at in times])) == 1


def test_times_that_need_a_long_and_a_short_run_are_both_reported() -> None:
    (message,) = refused(
        changes=[{"at": {"seconds": 60}}, {"at": {"fraction": 0.5}}],
        absences=[{"worker": 1, "leaves": {"fraction": 0.1}, "comes": {"seconds": 10}}],
    )
    assert "changes[1].at is after changes[0].at in a run of 120 s or longer" in message
    assert "absences[0].comes after absences[0].leaves in a run of 99 s or shorter" in message


_AT = st.one_of(
    st.integers(0, 12).map(lambda seconds: {"seconds": seconds}),
    st.integers(1, 9).map(lambda tenths: {"fraction": tenths / 10}),
)


@given(st.lists(_AT, max_size=5), st.tuples(_AT, _AT))
@settings(max_examples=examples(150), deadline=None)
def test_refused_times_are_out_of_order_at_every_length(
    times: list[dict[str, float]], absence: tuple[dict[str, float], dict[str, float]]
) -> None:
    def in_order(length_s: int) -> bool:
        def s(at: dict[str, float]) -> float:
            return at["seconds"] if "seconds" in at else at["fraction"] * length_s

        leaves, comes = map(s, absence)
        changes = [s(at) for at in times]
        return changes == sorted(changes) and leaves < comes

    lengths = [length_s for length_s in range(1, 200) if in_order(length_s)]
    fields = {
        "changes": [{"at": at} for at in times],
        "absences": [{"worker": 0, "leaves": absence[0], "comes": absence[1]}],
    }
    if not lengths:
        assert refused(**fields)
        return
    made = environment(**fields)
    own = [
        length_s
        for length_s in range(1, 200)
        if all(length_s in order.lengths() for order in time_orders(made, lambda _: True))
    ]
    assert own == lengths
    assert bool(made.run_lengths) == (lengths != list(range(1, 200)))

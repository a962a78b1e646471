"""Test the document of revocations.

- A revocation covers a worker or all workers of a site, and no other. A written document is read
  back unchanged.
- An unreadable document revokes no worker and states why. In a partly invalid document each valid
  name still counts.
- Names, reasons and counts are bounded, and control characters are removed.

Left out: the coordinator (tests/unit/operator/coordinator/test_revocations.py).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_api.protocol.revocation import (
    MAX_DOCUMENT_BYTES,
    MAX_REASON_CHARACTERS,
    MAX_REVOCATIONS,
    Revocation,
    is_revocable_name,
    parse_revocations,
    revocation_of,
    to_annotation,
)

LARGE = WorkerIdentity(Rank(3), SiteName("plant-b"), "large", 1)


@pytest.mark.parametrize("name", ["plant-b", "plant-b/large-1"])
def test_a_worker_is_covered_by_its_name_and_by_its_site(name: str) -> None:
    assert Revocation(name).covers(LARGE)
    assert Revocation(name).site == "plant-b"


@pytest.mark.parametrize(
    "name", ["plant", "plant-bb", "plant-b/large-0", "plant-b/large-11", "plant-a/large-1"]
)
def test_no_other_worker_is_covered(name: str) -> None:
    assert not Revocation(name).covers(LARGE)
    assert revocation_of([Revocation(name)], LARGE) is None


@pytest.mark.parametrize(
    "text",
    ["", "/", "plant-b/", "/large-1", "plant-b/large", "plant-b/large-01", "plant-b/large--1",
     "plant-b/large-1000", "Plant-b", "plant b", "plant-b\n", "plant-b/large-1/x", "../x-1",
     "a" * 41, "plant-b/" + "g" * 17 + "-1", "-a", "a-", "plänt"],
)  # fmt: skip
def test_an_invalid_name_is_refused(text: str) -> None:
    assert not is_revocable_name(text)


names = st.sampled_from(["a", "plant-b", "plant-b/large-0", "plant-b/large-999", "c/g-h-1"])
reasons = st.text(st.characters(codec="utf-8"), max_size=30)
revocations = st.builds(Revocation, names, reasons, st.booleans())


@given(st.lists(revocations, unique_by=lambda each: each.name))
def test_a_written_document_is_read_back(given_ones: list[Revocation]) -> None:
    printable = [
        replace(each, reason="".join(c for c in each.reason if c.isprintable()))
        for each in given_ones
    ]
    found, problem = parse_revocations(to_annotation(printable))
    assert (set(found), problem) == (set(printable), "")


@pytest.mark.parametrize(
    "text",
    ["{", "null", '"plant-b"', '{"name": "plant-b"}', "1e999", "[" * 100_000, "NaN",
     "[]" + " " * MAX_DOCUMENT_BYTES],
)  # fmt: skip
def test_a_document_that_is_not_a_list_revokes_no_worker_and_is_reported(text: str) -> None:
    found, problem = parse_revocations(text)
    assert found == ()
    assert problem
    assert len(problem) < 300


def test_a_missing_or_empty_document_is_valid() -> None:
    assert parse_revocations("") == parse_revocations("[]") == ((), "")


@pytest.mark.parametrize(
    "wrong", [None, 1, [], "plant-a", {}, {"name": 1}, {"name": "../a"}, {"name": ["plant-a"]}]
)
def test_a_wrong_entry_does_not_lift_the_others(wrong: Any) -> None:
    found, problem = parse_revocations(json.dumps([{"name": "plant-b"}, wrong, {"name": "c/g-1"}]))
    assert [each.name for each in found] == ["c/g-1", "plant-b"]
    assert "no name of a worker or site" in problem


def test_a_wrong_reason_does_not_lift_its_revocation() -> None:
    entries = [
        {"name": "a", "reason": "x" * 1000},
        {"name": "b", "reason": ["stolen"]},
        {"name": "c", "reason": "\x1b[2Jgone\nnow"},
    ]
    found, problem = parse_revocations(json.dumps(entries))
    assert not problem
    assert [each.reason for each in found] == [
        "x" * MAX_REASON_CHARACTERS, "['stolen']", "?[2Jgone?now"
    ]  # fmt: skip


def test_the_first_of_too_many_entries_count() -> None:
    entries = [{"name": f"site-{at:04}"} for at in range(MAX_REVOCATIONS + 5)]
    found, problem = parse_revocations(json.dumps(entries))
    assert len(found) == MAX_REVOCATIONS
    assert f"more than {MAX_REVOCATIONS}" in problem


def test_a_lifted_revocation_covers_no_worker() -> None:
    (lifted,), _ = parse_revocations('[{"name": "plant-b", "trusted": true}]')
    assert lifted.is_lifted
    assert not lifted.covers(LARGE)
    (kept,), _ = parse_revocations('[{"name": "plant-b", "trusted": "no"}]')
    assert kept.covers(LARGE)

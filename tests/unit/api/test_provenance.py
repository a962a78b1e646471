"""Test the statement about a model's origin.

A statement is read as it was written. One of 2,048 workers with the longest names and reasons fits
its limit. Any other form, size or type is refused with a reason. The version in it is the
project's.

Left out: signatures and their verification (tests/unit/cli/test_model_provenance.py).
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlion_api import VERSION
from dlion_api.errors import ContractError
from dlion_api.protocol.provenance import (
    MAX_COUNT,
    MAX_STATED_WORKERS,
    MAX_STATEMENT_BYTES,
    Evidence,
    ModelProvenance,
    ProvenanceStatement,
    RevokedEntry,
    StatedRun,
    WorkerUpdates,
)
from dlion_api.protocol.revocation import (
    MAX_NAME_CHARACTERS,
    MAX_REASON_CHARACTERS,
    MAX_REVOCATIONS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DIGESTS = {"model.keras": "ab" * 32, "model.json": "cd" * 32}
STATEMENT = ProvenanceStatement(
    DIGESTS,
    ModelProvenance(
        run=StatedRun("default", "digits", "1", "u-1"),
        site="plant-a",
        saved_by="plant-a/g-0",
        saved_at="2026-11-29T06:30:00+00:00",
        model="averaged",
        policy="adaptive",
        dlion_version=VERSION,
        start_model_sha256="cd" * 32,
        workers=(
            WorkerUpdates(0, "plant-a/g-0", Evidence.REPLICA, 640, 10),
            WorkerUpdates(2, "plant-b/g-0", Evidence.STEPS, 64, 3, revoked=True),
        ),
        revoked=(RevokedEntry("plant-b/g-0", "stolen"),),
    ),
)


def test_a_written_statement_is_read_back() -> None:
    content = STATEMENT.to_json()
    assert ProvenanceStatement.from_json(content) == STATEMENT
    document = json.loads(content)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["subject"] == [
        {"name": "model.keras", "digest": {"sha256": "ab" * 32}},
        {"name": "model.json", "digest": {"sha256": "cd" * 32}},
    ]


def test_the_maximum_of_workers_with_the_longest_texts_fits() -> None:
    name = "n" * MAX_NAME_CHARACTERS
    worker = WorkerUpdates(0, name, Evidence.REPLICA, MAX_COUNT, MAX_COUNT, revoked=True)
    largest = replace(
        STATEMENT.provenance,
        workers=tuple(replace(worker, rank=rank) for rank in range(MAX_STATED_WORKERS)),
        revoked=(RevokedEntry(name, "\U0001f600" * MAX_REASON_CHARACTERS),) * MAX_REVOCATIONS,
    )
    size = len(ProvenanceStatement(DIGESTS, largest).to_json())
    assert size <= MAX_STATEMENT_BYTES, size


def altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(STATEMENT.to_json())
    change(document)
    return json.dumps(document).encode()


def predicate(**values: object) -> bytes:
    return altered(lambda document: document["predicate"].update(values))


def first_worker(**values: object) -> bytes:
    return altered(lambda document: document["predicate"]["workers"][0].update(values))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b" " * (MAX_STATEMENT_BYTES + 1), "allowed: at most"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "given: list"),
        (b"{}", "of type"),
        (altered(lambda d: d.update(predicateType="https://slsa.dev/provenance/v1")), "of type"),
        (altered(lambda d: d.update(subject="model.keras")), "list of files"),
        (altered(lambda d: d.update(subject=[1])), "list of files"),
        (altered(lambda d: d.update(subject=[])), "model.keras and model.json"),
        (altered(lambda d: d["subject"].pop()), "model.keras and model.json"),
        (altered(lambda d: d["subject"].append(d["subject"][0])), "model.keras and model.json"),
        (altered(lambda d: d["subject"][0].update(name="other")), "model.keras and model.json"),
        (altered(lambda d: d["subject"][1].update(digest="ab" * 32)), "not an object"),
        (altered(lambda d: d["subject"][0].update(digest={"sha256": "AB" * 32})), "64 hex"),
        (altered(lambda d: d.pop("predicate")), "predicate"),
        (predicate(workers={}), "not a list"),
        (predicate(run="digits"), "not an object"),
        (predicate(more=1), "unknown fields"),
        (predicate(model="x" * 257), "longer than"),
        (predicate(saved_at="yesterday"), "isoformat"),
        (predicate(saved_at="2026-11-29T06:30:00"), "no offset"),
        (predicate(start_model_sha256="0"), "64 hex"),
        (predicate(revoked=[{"name": "a", "reason": ""}] * (MAX_REVOCATIONS + 1)), "revoked has"),
        (predicate(workers=[{}] * (MAX_STATED_WORKERS + 1)), "more than"),
        (first_worker(samples=True), "not an integer"),
        (first_worker(samples=-1), "not within"),
        (first_worker(samples=1.5), "integer"),
        (first_worker(evidence="rumour"), "unknown value"),
        (first_worker(worker="\ud800"), "surrogates"),
        (first_worker(rank=2), "twice"),
    ],
)  # fmt: skip
def test_any_other_statement_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        ProvenanceStatement.from_json(content)


def test_the_version_is_the_projects() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == VERSION

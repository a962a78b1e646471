"""Test the fields that the refusal of a changed job names.

It names only fields at or below the refused one, with both values.

Left out: what an API server refuses (tests/cluster/test_cli).
"""

from __future__ import annotations

from dlion_cli.cluster.submission import changed_fields
from manifest_table import changed, smallest

CHANGED = changed(smallest(), {"spec.trainer.seed": 7, "spec.exchange": {"policy": "full"}})


def test_only_fields_below_the_refused_one_are_named() -> None:
    named = changed_fields(smallest(), CHANGED, "spec.trainer")
    assert named.startswith("spec.trainer.seed: ")
    assert named.endswith(" → 7")
    assert ";" not in named


def test_without_a_field_all_changes_are_named() -> None:
    named = changed_fields(smallest(), CHANGED, "")
    assert "spec.trainer.seed: " in named
    assert "spec.exchange.policy: " in named


def test_equal_or_invalid_documents_name_none() -> None:
    assert changed_fields(smallest(), smallest(), "") == ""
    assert changed_fields(smallest(), {"spec": 1}, "") == ""

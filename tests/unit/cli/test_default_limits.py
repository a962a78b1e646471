"""Test the note of `dlion validate` about fields that sites refuse by default.

The note names the field, of any site and group, and the chart's value. A manifest that sites accept
has no note. The manifest stays valid, because a site may allow the field. Many fields give a short
note.

Left out: which fields are refused (tests/unit/operator/children/test_template_limits.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_cli.commands.local.validate import refused_by_default
from operator_world import dlion_job

if TYPE_CHECKING:
    from pathlib import Path

SECRET = {"spec": {"volumes": [{"name": "key", "secret": {"secretName": "db"}}]}}


def note_of(template: Any) -> str:
    document = dlion_job({"small": 1})
    document["spec"]["sites"][0]["groups"][0]["podTemplate"] = template
    return refused_by_default(load_job(document))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, ""),
        ({"spec": {"tolerations": [{"key": "edge", "operator": "Exists"}]}}, ""),
        (SECRET, "volumes[key].secret: Secret db (chart value tenancy.podTemplate;"),
        ({"spec": {"nodeName": "n"}}, "nodeName: the field nodeName"),
        ({"spec": {"containers": [{"$patch": "odd"}]}}, "is not a valid pod template, for group"),
        ({"spec": {f"field{n}": 1 for n in range(9)}}, " and 6 more ("),
    ],
)
def test_the_note_names_the_refused_fields(template: Any, words: str) -> None:
    note = note_of(template)
    assert (words in note) if words else (note == "")
    assert len(note) < 400


def test_a_manifest_stays_valid_and_has_the_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = dlion_job({"small": 1}, podTemplate=SECRET)
    del document["status"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    assert main(["validate", "--no-run", str(file)]) == 0
    assert "is valid, its sites refuse by default volumes[key].secret" in capsys.readouterr().out
    assert main(["validate", "--no-run", "-o", "json", str(file)]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["valid"]
    assert "Secret db" in result["note"]

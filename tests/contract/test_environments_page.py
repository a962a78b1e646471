"""Tests of the examples of docs/environments.md: they are environments for the quick start's job,
with a run of any length.

Left out: their effect (tests/unit/environments, tests/unit/simulator).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlion_cli.inputs.manifests import apply_set, load_manifest, read_document
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "environments.md"


def examples(folder: Path) -> list[Environment]:
    """The first example alone, and with the simulator's part of the second. The third moves other
    workers.
    """
    first, second, _ = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    kept = "".join(line for line in first.splitlines(True) if not line.startswith("betweenSites"))
    made = []
    for name, text in (("first", first), ("both", f"{kept}{second}")):
        path = folder / f"{name}.yaml"
        path.write_text(text)
        made.append(load_environment(path))
    return made


@pytest.mark.parametrize("length_s", [1, 10, 60, 100_000])
def test_the_examples_are_valid_for_the_quick_starts_job_at_any_length(
    tmp_path: Path, length_s: int
) -> None:
    document, _ = read_document(ROOT / "examples" / "digits.yaml")
    changed = apply_set(document, [f"trainer.stop.maxSeconds={length_s}"])
    job = load_manifest(changed, source="digits.yaml", lines=None)
    for environment in examples(tmp_path):
        plan = environment.plan(job.workers(), None, duration_s=length_s)
        environment.check(job)
        assert len(plan.changes) == 3
        assert not environment.run_lengths

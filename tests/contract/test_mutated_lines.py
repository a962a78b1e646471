"""Contract: every exchange policy has a central line that `tools/mutate_policies.py` flips; it is
there, once, and so are the tests that must notice.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from dlion_worker.policies.catalogue import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "tools" / "mutate_policies.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = tool
    spec.loader.exec_module(tool)
    return tool


MUTATIONS = _tool().CENTRAL_LINES


def test_every_policy_has_one() -> None:
    assert set(BUILT_IN) - {"none"} <= set(MUTATIONS)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_the_line_is_there(name: str) -> None:
    mutation = MUTATIONS[name]
    text = (ROOT / "worker" / "dlion_worker" / mutation.module).read_text()
    assert text.count(mutation.before) == 1
    assert (ROOT / mutation.tests).is_file()

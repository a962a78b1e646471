"""Test that settings of an operator that cannot be read are refused with their file.

Left out: the values that reach each setting (tests/chart/test_values.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import SpecError
from dlion_operator.model.settings import load_settings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "text", [b"a: [", b"a: \xff", b"namespaces: [2026-02-30]", b"site: " + b"9" * 5000]
)
def test_what_is_not_yaml_is_refused(text: bytes, tmp_path: Path) -> None:
    """Among it a date that does not exist, which Helm does not quote."""
    file = tmp_path / "config.yaml"
    file.write_bytes(text)
    with pytest.raises(SpecError, match=r"config\.yaml: 1 problem:\n.*is not YAML"):
        load_settings(file)

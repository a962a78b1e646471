"""Test that a file is replaced whole, whatever its name.

- Any name that the file system allows works. Nothing else stays in the folder, also after an error.

Left out: a full disk (tests/unit/results/test_faults.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlion_api.atomic_file import write_atomically

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "name", ["a", "a" * 255, "\U0001d6fc" * 63], ids=["short", "long", "of wide characters"]
)
def test_a_file_of_any_name_is_replaced(tmp_path: Path, name: str) -> None:
    for content in (b"first", b"second"):
        write_atomically(tmp_path / name, content)
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {name: content}


def test_a_name_that_is_too_long_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        write_atomically(tmp_path / ("a" * 256), b"")
    assert not list(tmp_path.iterdir())

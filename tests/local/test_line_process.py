"""Test a process that answers lines, and what its runner learns of its end.

The relay, the duty cycle and the fork server have tests of what they answer.
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from dlion_api.errors import UnavailableError
from dlion_local.emulation.line_process import LineProcess

if TYPE_CHECKING:
    from pathlib import Path


def process(folder: Path, code: str) -> LineProcess:
    (folder / "odd_end.py").write_text(code)
    return LineProcess("odd_end", folder, environment={**os.environ, "PYTHONPATH": str(folder)})


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import sys; sys.exit('no memory is left')", "with 1; its last output: no memory is left"),
        ("import os; os.kill(os.getpid(), 9)", "by signal 9; its last output: nothing"),
        (
            "import sys; sys.exit(sys.stdout.write('{\"pid\": ') and 3)",
            "with 3; its last output: nothing",
        ),
    ],
)
def test_the_end_of_a_process_is_reported_with_its_last_output(
    tmp_path: Path, code: str, end: str
) -> None:
    """Its log is in a temporary folder, which is removed with the run."""
    with closing(process(tmp_path, code)) as ending:
        ending.start()
        with pytest.raises(UnavailableError, match=end):
            ending.call({})
        assert ending.failure() == f"the odd end process has ended {end}"

"""Tests of three short simulated jobs with pinned traces.

The jobs are a synchronous one, an asynchronous one, and one in which a worker is lost and returns.
Each takes the same times and bytes as at the last `tools/check_traces.py --write`.

Left out: the values that TensorFlow computes, which differ between processors; the bit-for-bit
repetition of a run (tests/simulated).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "check_traces.py"


def test_three_simulated_jobs_have_their_pinned_traces() -> None:
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]

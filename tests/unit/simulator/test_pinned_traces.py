"""Three short simulated jobs have the traces that are pinned.

Proves: a synchronous job, an asynchronous one, and one in which a worker is lost and returns take
the same times and bytes as when `tools/check_traces.py --write` was last run. Left out: what
TensorFlow computes, which differs between processors, and that a run is repeated bit by bit
(tests/simulated).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools" / "check_traces.py"


def test_three_simulated_jobs_have_their_pinned_traces() -> None:
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]

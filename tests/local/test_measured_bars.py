"""Test that the short forms of `benchmarks/` meet their bounds, on real processes.

Quotas are hard, and links are shaped. Batch shares follow the workers' own speeds, before and after
a swap of their quotas. A full link is used, not overshot, and its drop is followed. The exchange
costs a bounded part of the gradient. A killed trainer is soon back and costs the others at most an
iteration. Each command without TensorFlow starts within 0.3 s.

Each script checks its own bounds and reports the result by its exit code. Left out: the spread over
runs (docs/benchmarks.md).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dlion_local.emulation.network.namespaces import namespaces_unavailable

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.root,
    pytest.mark.measured,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(namespaces_unavailable()), reason=namespaces_unavailable()),
]


@pytest.mark.parametrize(
    "command",
    [
        "quotas.py --short",
        "link.py --short",
        "exchange_cost.py --seconds 25",
        "command_start.py",
        "kill_restart.py --cycles 3 --mode bounded",
        "kill_restart.py --cycles 3 --mode synchronous",
    ],
)
def test_a_benchmark_meets_its_bounds(command: str) -> None:
    script, *arguments = command.split()
    called = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(called, capture_output=True, text=True, check=False, timeout=380)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr

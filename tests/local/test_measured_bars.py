"""Facts, on real processes with hard quotas and shaped links: batch shares follow what workers do
alone, before and after their quotas change places; a full link is used, not overshot, and followed
when it drops; the exchange costs a bounded part of the gradient; a trainer that is killed is soon
back and costs the others no more than an iteration; each command without TensorFlow starts within
0.3 s.

The scripts of `benchmarks/` are run in their short form; each holds its own bars, and its exit code
says whether they were met. Left out: the spread over runs, which docs/benchmarks.md has.
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
def test_a_benchmark_meets_its_bars(command: str) -> None:
    script, *arguments = command.split()
    called = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(called, capture_output=True, text=True, check=False, timeout=380)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr

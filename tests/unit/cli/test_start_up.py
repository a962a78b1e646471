"""Commands of a cluster start without what they do not need.

Proves: no module of such a command imports the manifest's classes, which take a fifth of its start;
nor the Kubernetes client, TensorFlow or asyncio.
Leaves out: the time itself (benchmarks/command_start.py).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

UNNEEDED = ("dlion_api.spec", "kubernetes", "tensorflow", "asyncio")


@pytest.mark.parametrize("command", ["get", "top", "describe", "events", "wait", "scale"])
def test_a_command_of_a_cluster_starts_without_what_it_does_not_need(command: str) -> None:
    code = (
        f"import sys, dlion_cli.command_line, dlion_cli.commands.cluster.{command}; "
        f"print([name for name in {UNNEEDED!r} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "[]\n"

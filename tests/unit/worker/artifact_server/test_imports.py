"""Tests of the imports of short-lived processes.

A keeper starts without TensorFlow and other modules that only training needs. A pod's first process
also starts without gRPC and NumPy, so that it becomes the next process quickly.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "without"),
    [
        (
            "dlion_worker.artifact_server.process",
            ["tensorflow", "keras", "numba", "sklearn", "matplotlib"],
        ),
        ("dlion_worker.pod.__main__", ["tensorflow", "numpy", "grpc", "yaml", "cryptography"]),
    ],
)
def test_a_start_loads_no_more_than_it_needs(module: str, without: list[str]) -> None:
    program = f"import sys, {module}; print([m for m in {without} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert result.stdout.strip() == "[]"

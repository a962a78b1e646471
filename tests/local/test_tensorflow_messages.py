"""Test that no line of TensorFlow reaches the output of the commands that train in virtual time.

Each command is a process of its own, as a user starts it: TensorFlow writes when it is imported, at
its first operation and when it compiles. On some processors it writes an error for operations of
integers, as those of a mask, and then does them in another way.

Left out: a library that is not found, as of a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits.yaml"
FOREIGN = re.compile(
    r"^[IWEF]\d{4} |^\d{4}-\d\d-\d\d |tensorflow|absl|onednn|xla|cuda", re.IGNORECASE | re.MULTILINE
)
SET_HERE = ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS")
"""Variables that this process may have, from tests before, and a user's shell has not."""
MASKED = """
import keras
import numpy as np


def build_model():
    embedding = keras.layers.Embedding(50, 8, mask_zero=True)
    outputs = keras.layers.Dense(1, activation="sigmoid")
    return keras.Sequential([keras.Input((10,)), embedding, keras.layers.LSTM(8), outputs])


def load_data(split, site, worker_index):
    words = np.random.default_rng(0).integers(0, 50, (64, 10))
    return words, words[:, 0] % 2
"""
SHORT = ("--no-report", "--set", "trainer.stop={maxSteps: 2}")


def messages_of(*words: str | Path) -> str:
    """Return what the command prints to both streams."""
    ended = subprocess.run(
        [sys.executable, "-m", "dlion_cli", *map(str, words)],
        env={name: value for name, value in os.environ.items() if name not in SET_HERE},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The result folder of a simulation, and what it printed."""
    out = tmp_path_factory.mktemp("simulated") / "out"
    return out, messages_of("simulate", DIGITS, "-e", "quickstart", "--out", out, *SHORT)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["simulate", "replay", "calibrate"])
def test_no_line_is_foreign(tmp_path: Path, simulated: tuple[Path, str], command: str) -> None:
    folder, printed = simulated
    if command == "replay":
        printed = messages_of("replay", folder, "--out", tmp_path / "out", *SHORT)
    elif command == "calibrate":
        costs = tmp_path / "costs.json"
        printed = messages_of("calibrate", "--batches", "8,16", "--rounds", "3", "--out", costs)
    assert printed
    assert FOREIGN.findall(printed) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["simulate", "validate"])
def test_no_line_is_foreign_with_a_program_of_integers(tmp_path: Path, command: str) -> None:
    (tmp_path / "program.py").write_text(MASKED)
    document = yaml.safe_load(DIGITS.read_text())
    document["spec"]["trainer"] |= {"program": {"file": "program.py"}, "dataset": {}}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(document))
    options = ("-e", "quickstart", "--out", tmp_path / "out", *SHORT)
    printed = messages_of(command, manifest, *(options if command == "simulate" else ()))
    assert printed
    assert FOREIGN.findall(printed) == []

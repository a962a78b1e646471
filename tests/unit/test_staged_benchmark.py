"""Test the last line of `benchmarks/staged.py`.

It names the row of fewest bits among those as accurate as training end to end. Rows with wrong
labels, or of an encoder of other classes, do not count. There may be no such row.

Left out: training.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import staged

BITS = {
    "8 values of 8 bits": 64.0,
    "8 values of 4 bits": 32.0,
    "staged, 10% wrong": 32.0,
    "new decoder, encoder of five classes": 16.0,
    "end to end": 640.0,
}


@pytest.mark.parametrize(
    ("whole", "from_encoder", "coded", "words"),
    [
        (0.9, 0.8, (0.91, 0.896), "8 values of 4 bits, 20.0 times fewer bits"),
        (0.9, 0.8, (0.91, 0.894), "8 values of 8 bits, 10.0 times fewer bits"),
        (0.9, 0.92, (0.91, 0.9), "none"),
        (0.92, 0.9, (0.91, 0.9), "none"),
    ],
)
def test_only_rows_of_correct_labels_and_all_classes_compete(
    whole: float, from_encoder: float, coded: tuple[float, float], words: str
) -> None:
    accuracy = {name: [0.99] for name in BITS}
    accuracy |= {"end to end": [whole], "end to end from the encoder": [from_encoder]}
    accuracy |= {"8 values of 8 bits": [coded[0]], "8 values of 4 bits": [coded[1]]}
    shown = staged.equal_accuracy(accuracy, BITS)
    assert shown == f"\nWithin 0.5 points of the better one end to end: {words}"

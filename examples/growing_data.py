"""Write hand-written digits for examples/growing.yaml: `growing_data.py FOLDER [--late]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

FOLDERS = ("plant-a/0", "plant-a/1", "plant-b/0")
LATE_CLASS = 9


def main() -> None:
    """Write the first files, or with --late the later ones, at only one worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--late", action="store_true", help="add the digit 9 at plant-b")
    arguments = parser.parse_args()
    digits = load_digits()
    x = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    y = digits.target
    order = np.random.default_rng(1).permutation(len(y))
    held, rest = order[:400], order[400:]
    if arguments.late:
        chosen = rest[y[rest] == LATE_CLASS]
        save(arguments.folder / FOLDERS[-1] / "late.npz", x[chosen], y[chosen])
        return
    save(arguments.folder / "held-out.npz", x[held], y[held])
    early = rest[y[rest] != LATE_CLASS]
    for number, folder in enumerate(FOLDERS):
        chosen = early[number :: len(FOLDERS)]
        save(arguments.folder / folder / "early.npz", x[chosen], y[chosen])


def save(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Write samples under a temporary name first, so that no worker reads a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".writing")
    with fresh.open("wb") as file:
        np.savez(file, x=x, y=y)
    fresh.replace(path)


if __name__ == "__main__":
    main()

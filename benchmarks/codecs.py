"""Measure the cost of each codec: bytes, error, milliseconds to encode, decode and add.

    python benchmarks/codecs.py [--entries N] [--repeat R]

Times are of one core (process time; minimum of R runs), with whole float32 beside all others in the
same run. Errors are the norm of the loss over the norm of the input. Positions are those of the
largest entries of a vector without structure. The floor is the entropy of a random choice of each
entry, per kept entry.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
from selection import add, commit, min_ms, some_gradient

from dlion_core.codecs import (
    HEADER_BYTES,
    Coding,
    IndexCodec,
    SelectedEntries,
    ValueCodec,
    decode_gradient,
    encode_selected,
    encode_whole,
)
from dlion_core.codecs.positions import Positions

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dlion_core.codecs.payload import Payload

DENSITIES = (0.001, 0.01, 0.1, 0.5)


def measured(
    encode: Callable[[], Payload], value_D: NDArray[np.float32], repeat: int
) -> tuple[int, float, float, float]:
    """Return bytes, milliseconds to encode, to decode and add, and the lost share of the norm."""
    payload, target_D = encode(), np.zeros_like(value_D)
    encode_ms = min_ms(encode, repeat)
    decode_ms = min_ms(lambda: add(decode_gradient(payload, value_D.size), target_D), repeat)
    back_D = decode_gradient(payload, value_D.size).weighted(np.float32(1))
    lost = float(np.linalg.norm(back_D - value_D) / np.linalg.norm(value_D))
    return len(payload), encode_ms, decode_ms, lost


def print_values(value_D: NDArray[np.float32], repeat: int, codings: list[Coding]) -> None:
    """Print one row for each coding of the whole vector."""
    print("| values | bytes | of float32 | encode, ms | decode + add, ms | lost |")
    print("|---|---|---|---|---|---|")
    for coding in codings:
        size, encode_ms, decode_ms, lost = measured(
            lambda c=coding: encode_whole(value_D, c), value_D, repeat
        )
        decimals = f", {coding.decimals} decimals" if coding.values == "polyline" else ""
        share = size / (HEADER_BYTES + 4 * value_D.size)
        print(
            f"| {coding.values}{decimals} | {size} | {share:.1%} | {encode_ms:.2f} |"
            f" {decode_ms:.2f} | {lost:.2g} |"
        )


def selected_of(value_D: NDArray[np.float32], density: float) -> SelectedEntries:
    """Return this many of its largest entries."""
    kept = max(1, int(density * value_D.size))
    magnitude_D = np.abs(value_D)
    cut = np.partition(magnitude_D, value_D.size - kept)[value_D.size - kept]
    kept = int((magnitude_D >= cut).sum())
    cut_L = np.array([cut], np.float32).view(np.uint32)
    return SelectedEntries(value_D, np.array([value_D.size]), cut_L, kept, float(magnitude_D.max()))


def print_positions(value_D: NDArray[np.float32], repeat: int) -> None:
    """Print one row for each density and index codec, values as float16."""
    print("| kept | positions | coded as | bits per entry kept | floor | encode, ms | decode + add,"
          " ms |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for density, indices in itertools.product(DENSITIES, IndexCodec):
        coding, selected = Coding(ValueCodec.FLOAT16, indices), selected_of(value_D, density)
        payload = encode_selected(selected, coding)
        sent_D = np.zeros_like(value_D)
        sent_D[selected.index_K()] = value_D[selected.index_K()]
        size, encode_ms, decode_ms, _ = measured(
            lambda s=selected, c=coding: encode_selected(s, c), sent_D, repeat
        )
        values = HEADER_BYTES + ValueCodec.FLOAT16.bytes_of(selected.kept)
        share = selected.kept / value_D.size
        floor = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
        bits, scheme = 8 * (size - values) / selected.kept, Positions(payload[2]).name.lower()
        print(
            f"| {density:.1%} | {indices} | {scheme} | {bits:.2f} | {floor:.2f} |"
            f" {encode_ms:.2f} | {decode_ms:.2f} |"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_100_000)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    print(f"commit {commit()}, {options.entries} entries, NumPy {np.__version__}, one core")
    gradient_D, _ = some_gradient(options.entries)
    rng = np.random.default_rng(0)
    print("\nA gradient, whole: heavy-tailed, each variable on a scale of its own.\n")
    plain = [codec for codec in ValueCodec if codec is not ValueCodec.POLYLINE]
    print_values(gradient_D, options.repeat, [Coding(codec) for codec in plain])
    weights_D = (rng.standard_normal(options.entries) * 0.05).astype(np.float32)
    print("\nWeights, whole: normal, of standard deviation 0.05.\n")
    lines = [Coding(ValueCodec.POLYLINE, decimals=decimals) for decimals in (2, 3, 4)]
    whole = [Coding(ValueCodec.FLOAT32), Coding(ValueCodec.FLOAT16)]
    print_values(weights_D, options.repeat, [*whole, *lines])
    print("\nThe largest entries of a vector without structure, values as float16.\n")
    print_positions(rng.standard_normal(options.entries).astype(np.float32), options.repeat)


if __name__ == "__main__":
    main()

"""Measure the cost of Max N: milliseconds to select, encode, decode and add, against a naive sort.

    python benchmarks/selection.py [--entries N] [--repeat R] [--narrow]

Times are of one core (process time; minimum of R runs). The naive baseline sorts every variable's
magnitudes for each link, as a threshold without a histogram requires, and codes the same way. GB/s
refer to the gradient as float32, beside a copy of it.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np
from local_runs import commit

from dlion_api.names import Rank
from dlion_core.codecs import (
    GradientPart,
    SelectedEntries,
    ValueCodec,
    coded_bytes,
    decode_gradient,
    encode_selected,
    encode_whole,
    max_kept_entries,
)
from dlion_core.policies.gradient.gradient_selectors import MaxN
from dlion_core.policies.gradient.magnitudes import Magnitudes
from dlion_core.policies.interface import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

CIPHER_SHARES = (0.0008, 0.0165, 0.0329, 0.8912, 0.057, 0.0016)
"""Sizes of the variables of a small convolutional network, as shares of all entries."""

BUDGET_SHARES = {
    "5 links, 5-15 %": (0.05, 0.075, 0.1, 0.125, 0.15),
    "3 links, 25-90 %": (0.25, 0.5, 0.9),
}


NARROW_SHARES = {
    "3 equal links, 1 %": (0.01, 0.01, 0.01),
    "3 unequal links, 0.6-1 %": (0.006, 0.008, 0.01),
    "3 equal links, 10 %": (0.1, 0.1, 0.1),
    "3 unequal links, 6-10 %": (0.06, 0.08, 0.1),
}
"""Shares of the entries that a link carries."""


def some_gradient(entries: int) -> tuple[NDArray[np.float32], Layout]:
    """Return heavy-tailed values, each variable on its own scale."""
    rng = np.random.default_rng(0)
    sizes = [max(1, int(share * entries)) for share in CIPHER_SHARES[:-1]]
    sizes.append(entries - sum(sizes))
    scales = np.repeat(10.0 ** rng.integers(-4, 0, len(sizes)), sizes)
    gradient_D = rng.standard_normal(entries) * np.exp(rng.standard_normal(entries)) * scales
    return gradient_D.astype(np.float32), Layout(tuple(map(str, range(6))), tuple(sizes))


def min_ms(work: Callable[[], object], repeat: int) -> float:
    """Return process milliseconds of the fastest of several runs."""
    times = []
    for _ in range(repeat):
        began_s = time.process_time()
        work()
        times.append(time.process_time() - began_s)
    return 1000 * min(times)


def naive(
    gradient_D: NDArray[np.float32], layout: Layout, budgets: list[int], codec: ValueCodec
) -> list[int]:
    """Return the bytes of each link's payload, whose threshold is found by sorting all ratios."""
    sizes = []
    end_L = np.array([where.stop for where in layout.slices()], np.int64)
    for budget in budgets:
        ratio_D = np.abs(gradient_D)
        peak_L = np.array([ratio_D[where].max() for where in layout.slices()])
        for where, peak in zip(layout.slices(), peak_L, strict=True):
            ratio_D[where] /= peak
        kept = max_kept_entries(budget, layout.size, codec)
        threshold = np.sort(ratio_D)[layout.size - kept]
        kept = int(np.count_nonzero(ratio_D >= threshold))
        cut_L = [
            np.abs(gradient_D[where])[ratio_D[where] >= threshold].min().view(np.uint32)
            for where in layout.slices()
        ]
        selected = SelectedEntries(gradient_D, end_L, np.array(cut_L), kept, float(peak_L.max()))
        sizes.append(len(encode_selected(selected, codec)))
    return sizes


def rows(entries: int, repeat: int, codec: ValueCodec) -> list[tuple[str, float, str]]:
    """Return name, milliseconds and remark of each measurement."""
    gradient_D, layout = some_gradient(entries)
    whole_bytes = codec.bytes_of(entries)
    target_D = np.zeros(entries, np.float32)
    magnitudes = Magnitudes(layout)
    found = [
        ("histogram of all entries", min_ms(lambda: magnitudes.measure(gradient_D), repeat), "")
    ]
    for name, shares in BUDGET_SHARES.items():
        budgets = [int(share * whole_bytes) for share in shares]
        peers = [Rank(place) for place in range(len(budgets))]
        policy, by_peer = MaxN(layout, codec), dict(zip(peers, budgets, strict=True))
        ours = min_ms(lambda p=policy, b=by_peer, r=peers: p.prepare(gradient_D, r, b), repeat)
        sort = min_ms(lambda b=budgets: naive(gradient_D, layout, b, codec), max(2, repeat // 4))
        found.append((f"select + encode, {name}", ours, f"{sort / ours:.1f}x quicker than sorting"))
        payload = policy.prepare(gradient_D, peers, by_peer).payloads[peers[1]]
        received = min_ms(lambda p=payload: add(decode_gradient(p, entries), target_D), repeat)
        found.append((f"decode + add, {len(payload)} bytes", received, ""))
    payload = encode_whole(gradient_D, codec)
    found.append(("encode, whole", min_ms(lambda: encode_whole(gradient_D, codec), repeat), ""))
    received = min_ms(lambda: add(decode_gradient(payload, entries), target_D), repeat)
    found.append(("decode + add, whole", received, ""))
    return found


def narrow_rows(entries: int, repeat: int, codec: ValueCodec) -> list[tuple[str, float, str]]:
    """Return the same for links that carry few entries, with gigabytes per second."""
    gradient_D, layout = some_gradient(entries)
    work: dict[str, Callable[[], object]] = {"copy": gradient_D.copy}
    for name, shares in NARROW_SHARES.items():
        budgets = {
            Rank(place): coded_bytes(int(share * entries), entries, codec)
            for place, share in enumerate(shares)
        }
        policy = MaxN(layout, codec)
        work[f"select + encode, {name}"] = (
            lambda p=policy, b=budgets: p.prepare(gradient_D, list(b), b)  # type: ignore[misc]
        )
    times = {name: min_ms(one, repeat) for name, one in work.items()}
    return [(name, ms, f"{gradient_D.nbytes / 1e6 / ms:.1f} GB/s") for name, ms in times.items()]


def add(part: GradientPart, target_D: NDArray[np.float32]) -> None:
    """Add one weighted contribution."""
    part.add_to(target_D, np.float32(0.25))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_100_000)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--narrow", action="store_true", help="only links that carry few entries")
    options = parser.parse_args()
    print(f"commit {commit()}, {options.entries} entries, NumPy {np.__version__}, one core")
    for codec in ValueCodec:
        print(f"\n| {codec} | ms | |\n|---|---|---|")
        found = narrow_rows(options.entries, options.repeat, codec)
        if not options.narrow:
            found += rows(options.entries, options.repeat, codec)
        for name, milliseconds, remark in found:
            print(f"| {name} | {milliseconds:.2f} | {remark} |")


if __name__ == "__main__":
    main()

"""The coordinate-wise trimmed mean: of each entry the largest and smallest values are left out.

An entry that a contribution does not have is zero there, and such zeros are sorted and left out
like other values. So of entries that few contributions have, most is lost: with four workers an
entry counts only if two send it with the same sign. Contributions count equally.

Source: Yin, Chen, Ramchandran & Bartlett, *Byzantine-robust distributed learning*, ICML 2018. Ours:
zeros for absent entries.

Shape suffixes: P contributions, B entries of a block, D all entries.
"""

from collections.abc import Sequence

import numpy as np

from dlion_core.policies.interface import Flat

_BLOCK = 2**16
"""Entries sorted at a time."""

MAX_SUM = np.float32(2.0**120)
"""Limit of sums of received values, since finite values could add up to infinity."""


def trimmed_mean(value_PD: Sequence[Flat], size: int, trim: int) -> Flat:
    """Return the mean of each entry without its `trim` largest and smallest values, shape [D].

    At least one or two values remain; with `trim` at its largest this is the median.

    >>> rows = [np.array([one], np.float32) for one in (1, 2, 3, 99)]
    >>> float(trimmed_mean(rows, 1, 1)[0])
    2.5
    """
    count = len(value_PD)
    cut = min(trim, (count - 1) // 2)
    mean_D = np.empty(size, np.float32)
    for at in range(0, size, _BLOCK):
        block = slice(at, at + _BLOCK)
        sorted_PB = np.sort(np.stack([value_D[block] for value_D in value_PD]), axis=0)
        kept_PB = np.clip(sorted_PB[cut : count - cut], -MAX_SUM, MAX_SUM)
        mean_D[block] = kept_PB.mean(axis=0, dtype=np.float32)
    return mean_D

"""Max-min fair rates of transfers that share pipes: a compiled loop.

Called by `network` whenever a transfer begins or ends, with up to thousands of transfers. Each sum
and product is the one that NumPy would compute, in the same order, so that rates are the same bit
for bit. Shape suffixes: F transfers, P pipes, K pipes of a transfer.

Source: Bertsekas and Gallager, Data Networks, 1992, section 6.5.2 (progressive filling).
"""

from typing import Any

import numpy as np
from numba import types

from dlion_core.compiling import compiled, inlined, read_only

_EQUAL_SHARE_FACTOR = 1 + 1e-9


@inlined
def _add_to_pipes(pipe_K: Any, count_P: Any) -> None:
    for pipe in pipe_K:
        if pipe >= 0:
            count_P[pipe] += 1


@inlined
def _has_share_up_to(pipe_K: Any, share_P: Any, most: Any) -> Any:
    """Whether the fair share of some of these pipes is at most that."""
    found = False
    for pipe in pipe_K:
        found |= pipe >= 0 and share_P[pipe] <= most
    return found


@compiled(
    types.float64[::1](
        read_only(types.float64), types.Array(types.int64, 2, "C"), read_only(types.boolean)
    )
)
def max_min_fair_rates(capacity_P: Any, pipe_FK: Any, is_cut_F: Any) -> Any:
    """Return the rates [F]; 0 for a transfer that is cut, inf for one without pipes.

    `pipe_FK` has each transfer's pipes; -1 fills up a row. Repeatedly fixes the transfers in the
    pipe with the smallest fair share.
    """
    left_P = capacity_P.copy()
    count_P = np.zeros(left_P.size, np.int64)
    stopped_P = np.zeros(left_P.size, np.int64)
    share_P = np.empty(left_P.size, np.float64)
    rate_F = np.empty(is_cut_F.size, np.float64)
    rising = np.empty(is_cut_F.size, np.int64)
    rising_count = 0
    for f in range(is_cut_F.size):
        rate_F[f] = 0.0 if is_cut_F[f] else np.inf
        if not is_cut_F[f] and pipe_FK.shape[1] and pipe_FK[f, 0] >= 0:
            rising[rising_count] = f
            rising_count += 1
            _add_to_pipes(pipe_FK[f], count_P)
    while rising_count:
        least = np.inf
        for p in range(left_P.size):
            share_P[p] = left_P[p] / count_P[p] if count_P[p] else np.inf
            least = min(least, share_P[p])
        share = max(0.0, least)
        stopped_P[:] = 0
        kept = 0
        for k in range(rising_count):
            f = rising[k]
            if _has_share_up_to(pipe_FK[f], share_P, share * _EQUAL_SHARE_FACTOR):
                rate_F[f] = share
                _add_to_pipes(pipe_FK[f], stopped_P)
            else:
                rising[kept] = f
                kept += 1
        rising_count = kept
        for p in range(left_P.size):
            if stopped_P[p]:
                left_P[p] -= share * stopped_P[p]
                count_P[p] -= stopped_P[p]
    return rate_F

"""The balance of positive and negative entries of a contribution.

Called by `deviations`. A vector that differs from the mean by a part of the standard deviation
of each entry differs from honest ones in no norm and in few directions, but in its signs.

Source: Xu, Huang, Song & Lan, *Byzantine-robust federated learning through collaborative malicious
gradient filtering* (SignGuard), ICDCS 2022. Ours: one figure instead of clusters of three, since
there may be three workers; not all entries.
"""

import numpy as np

from dlion_core.policies.claims.sent_entries import SentEntries

BLOCK, MAX_ENTRIES = 512, 2**15
"""Entries are taken in blocks, evenly spaced over the layers, about so many in all."""

MIN_SIGNS = 256
"""Entries that are not zero. Fewer may have one sign by chance."""


def sign_balance(sent: SentEntries, first_block: int = 0) -> float | None:
    """Return (positive - negative) / (positive + negative) entries, from -1 to 1.

    None if too few entries are not zero. `first_block` chooses the blocks: an attacker that
    does not know it cannot attack the others alone.

    >>> value_D = np.repeat(np.array([1, 1, 1, -1, 0], np.float32), 100)
    >>> sign_balance(SentEntries(value_D, None, value_D.size))
    0.5
    """
    taken = sent.value_K
    if sent.size > MAX_ENTRIES:
        every = -(-sent.size // MAX_ENTRIES)
        taken = sent.in_blocks(first_block % every, every, BLOCK)
    positive, negative = int(np.count_nonzero(taken > 0)), int(np.count_nonzero(taken < 0))
    signs = positive + negative
    return (positive - negative) / signs if signs >= MIN_SIGNS else None

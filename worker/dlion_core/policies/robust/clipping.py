"""Centred clipping: a contribution counts with a bounded norm.

    v + sum_i p_i (x_i - v) min(1, radius / |x_i - v|)

with p_i the share of samples. Here v is zero, and there is one iteration. The paper starts from
the last aggregate, which a worker that has just joined does not have; contributions with few and
different entries are little nearer to it than to zero. The radius is a multiple of a median of the
norms of the same round: no history, for the same reason.

Source: Karimireddy, He & Jaggi, *Learning from history for Byzantine robust optimization*, ICML
2021 (rule CC). Ours: v, the radius, and weights by samples.
"""

from collections.abc import Sequence

RADIUS_RATIO = 2.0
"""Ratio of the radius to the upper median of norms. With three other workers of equal norm that
agree, a contribution of twice their norm cannot reverse the sum."""


def clipping_factors(norms: Sequence[float]) -> list[float]:
    """Return the factor of each contribution, at most 1, from the norms of all.

    The median is over the norms that are not zero: workers without entries say nothing. Of an even
    number the larger of the middle two counts, so that of two contributions none is clipped.

    >>> clipping_factors([1.0, 1.5, 1.0, 30.0])
    [1.0, 1.0, 1.0, 0.1]
    """
    known = sorted(norm for norm in norms if norm > 0)
    if not known:
        return [1.0] * len(norms)
    radius = RADIUS_RATIO * known[len(known) // 2]
    return [1.0 if norm <= radius else radius / norm for norm in norms]

"""Multi-Krum: the contributions that are nearest to each other.

The score of a contribution is the sum of its squared distances to its n - f - 2 nearest others,
with f of n that may be bad. The n - f contributions of the smallest scores are kept.

Source: Blanchard, El Mhamdi, Guerraoui & Stainer, *Machine learning with adversaries: Byzantine
tolerant gradient descent*, NeurIPS 2017. Its proof needs n >= 2 f + 3, hence five workers; four
have one neighbour to be compared with.
"""

from collections.abc import Sequence

from dlion_core.codecs.norms import squared_distance
from dlion_core.policies.interface import Flat


def nearest(value_PD: Sequence[Flat], bad: int) -> list[int]:
    """Return the ascending positions of those kept. `bad`: f. Equal scores: the lower position.

    With fewer than f + 3 contributions nothing can be compared, and all are kept.

    >>> import numpy as np
    >>> nearest([np.array([x], np.float32) for x in (1.0, 1.1, 9.0, 0.9)], 1)
    [0, 1, 3]
    """
    count = len(value_PD)
    compared = count - bad - 2
    if compared < 1:
        return list(range(count))
    distance = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            between = float(squared_distance(value_PD[i], value_PD[j]))
            distance[i][j] = distance[j][i] = between
    scores = [sum(sorted(row[:i] + row[i + 1 :])[:compared]) for i, row in enumerate(distance)]
    return sorted(sorted(range(count), key=scores.__getitem__)[: count - bad])

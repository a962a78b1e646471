"""Rests between steps that keep a worker within its share of compute. Pure."""


def rest_s(share: float, *, busy_s: float, wall_s: float) -> float:
    """Seconds to rest before the next step, after one that was busy for `busy_s` of `wall_s`.

    A step that waited for peers has rested already. Raises ValueError for a share outside of
    0 < share <= 1.

    >>> rest_s(0.5, busy_s=2.0, wall_s=2.0), rest_s(0.5, busy_s=2.0, wall_s=3.5)
    (2.0, 0.5)
    >>> rest_s(0.5, busy_s=2.0, wall_s=9.0), rest_s(1.0, busy_s=2.0, wall_s=2.0)
    (0.0, 0.0)
    """
    if not 0 < share <= 1:
        raise ValueError(f"share {share}; allowed: above 0, at most 1")
    return max(0.0, busy_s / share - max(wall_s, busy_s))


class BusyTime:
    """The share of time that was busy, of steps that are reported when they end.

    A step may be longer than the interval between two readings: what does not fit into one counts
    in the next.
    """

    def __init__(self) -> None:
        self._unread_s = 0.0

    def add(self, busy_s: float) -> None:
        """Add a step's busy seconds."""
        self._unread_s += max(0.0, busy_s)

    def share(self, interval_s: float) -> float:
        """The busy share of the last `interval_s` seconds, 0 to 1.

        >>> busy = BusyTime()
        >>> busy.add(3.0)
        >>> busy.share(2.0), busy.share(2.0), busy.share(2.0)
        (1.0, 0.5, 0.0)
        """
        if interval_s <= 0:
            return 0.0
        read_s = min(self._unread_s, interval_s)
        self._unread_s -= read_s
        return read_s / interval_s

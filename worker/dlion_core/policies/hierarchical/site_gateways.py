"""Choice of gateways in `hierarchical`, and how workers report it to each other.

A site's gateway is its lowest rank that is known to train. But links fail individually. A worker
without a link to its gateway would choose itself or the next rank, and wait for gradients that go
elsewhere. So each step report contains two ranks for its receiver: the worker that the sender
follows, and the one that it regards as the gateway of the receiver's site. A worker that learns of
a gateway without a link to it follows the lowest sender of such a report. It then contributes
nothing and takes results from there until its link is back.

Used by `hierarchical`. Sends nothing itself.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dlion_api.names import Rank

_VIEWS: Final = 2**32
"""Step reports encode a view in the weights version, from this value on: both ranks plus one."""


@dataclass(frozen=True)
class GatewayView:
    """A worker's view of gateways, for one receiver."""

    follows: Rank
    """The worker that provides the sender's results; itself if it computes them."""
    yours: Rank
    """Which worker it regards as the gateway of the receiver's site."""


def to_version(view: GatewayView) -> int:
    """Encode a view as a weights version.

    >>> from_version(to_version(GatewayView(Rank(3), Rank(0)))) == GatewayView(Rank(3), Rank(0))
    True
    """
    return _VIEWS * (view.follows + 1) + view.yours + 1


def from_version(version: int) -> GatewayView | None:
    """Decode the view of a weights version; None: it has none."""
    follows, yours = divmod(version, _VIEWS)
    return GatewayView(Rank(follows - 1), Rank(yours - 1)) if follows and yours else None


class GatewayTracker:
    """What one worker knows about training workers and gateways."""

    def __init__(self, own: Rank, groups: Sequence[Collection[Rank]]) -> None:
        self._own = own
        self.group_of = {rank: at for at, group in enumerate(groups) for rank in group}
        self.home = self.group_of[own]
        self._stepped_to: dict[Rank, int] = {}  # counts only local steps since it joined
        self._views: dict[Rank, GatewayView] = {}
        self._sent_views: dict[Rank, GatewayView] = {}

    # ---- reports from workers --------------------------------------------------------------------

    def stepped(self, rank: Rank, iteration: int, version: int) -> None:
        """Record a worker's local step and its view of gateways."""
        self._stepped_to[rank] = max(self._stepped_to.get(rank, 0), iteration)
        if (view := from_version(version)) is not None:
            self._views[rank] = view

    def forget(self, rank: Rank) -> None:
        """Drop what a worker reported: it has left or rejoined."""
        for known in (self._stepped_to, self._views, self._sent_views):
            known.pop(rank, None)

    # ---- results ---------------------------------------------------------------------------------

    def step_of(self, rank: Rank) -> int:
        """Return the last local step of a worker; 0: not known to train."""
        return self._stepped_to.get(rank, 0)

    def members(self, group: int, counted: Iterable[Rank]) -> list[Rank]:
        """Return the workers of that group among those counted."""
        return [rank for rank in counted if self.group_of[rank] == group]

    def in_sight(self, group: int, counted: Iterable[Rank]) -> Rank | None:
        """Return the lowest training worker of the group, this one included; None: none."""
        lowest = self._own if group == self.home else None
        for rank in counted:
            is_lower = lowest is None or rank < lowest
            if is_lower and self.group_of[rank] == group and self.step_of(rank):
                lowest = rank
        return lowest

    def gateway(self, counted: Collection[Rank]) -> tuple[Rank, bool]:
        """Return the worker that this one follows, and whether it is its site's gateway (maybe
        itself). False: it stands in for a gateway without a link to this worker."""
        lowest = self.in_sight(self.home, counted)
        assert lowest is not None
        for rank in counted:
            view = self._views.get(rank)
            if view is None or view.follows == self._own:
                continue
            if view.yours < lowest and self.group_of.get(view.yours) == self.home:
                return rank, False
        return lowest, True

    def followers(self, linked: Iterable[Rank]) -> Iterator[Rank]:
        for rank in linked:
            view = self._views.get(rank)
            if view is not None and view.follows == self._own:
                yield rank

    def takers_for_gateway(self, linked: Iterable[Rank]) -> Iterator[Rank]:
        """Return workers of other sites that regard this one as its site's gateway."""
        for rank in linked:
            view = self._views.get(rank)
            if view is not None and view.yours == self._own and self.group_of[rank] != self.home:
                yield rank

    def views(self, counted: Collection[Rank], linked: Collection[Rank]) -> dict[Rank, GatewayView]:
        """Return the view to report to each linked worker."""
        follows, _ = self.gateway(counted)
        lowest = {at: self.in_sight(at, counted) for at in {self.group_of[r] for r in linked}}
        views = {}
        for rank in linked:
            yours = lowest[self.group_of[rank]]
            views[rank] = GatewayView(follows, rank if yours is None else yours)
        return views

    def changed_views(self, views: Mapping[Rank, GatewayView]) -> dict[Rank, GatewayView]:
        """Return the views that differ from those last sent."""
        return {rank: view for rank, view in views.items() if self._sent_views.get(rank) != view}

    def record_sent(self, views: Mapping[Rank, GatewayView]) -> None:
        self._sent_views.update(views)

"""Whom workers of `hierarchical` take for a site's gateway, and how they tell each other.

A site's gateway is the lowest rank of it that is known to train. Links break one by one, though:
a worker without one to its gateway would take itself, or the next, for it, and wait for gradients
that go elsewhere. So each word that a step is done also says two things, to each receiver its own:
whom the sender follows, and whom it takes for the gateway of the receiver's site. Who hears of a
gateway that it is not linked with follows the lowest of those who told so instead: it gives
nothing, counts nowhere, and takes the results from there until its link is back.

Called by `hierarchical`. Nothing is sent here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dlion_api.names import Rank

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_VIEWS: Final = 2**32
"""Of a word that a step is done the weights version, from here on: both ranks, each plus one."""


@dataclass(frozen=True)
class View:
    """What a worker says of gateways, to one other."""

    follows: Rank
    """Whose results it takes; its own rank where it makes them."""
    yours: Rank
    """Whom it takes for the gateway of the receiver's site."""


def to_version(view: View) -> int:
    """A view as a weights version.

    >>> from_version(to_version(View(Rank(3), Rank(0)))) == View(Rank(3), Rank(0))
    True
    """
    return _VIEWS * (view.follows + 1) + view.yours + 1


def from_version(version: int) -> View | None:
    """The view that a weights version stands for; None: it is none."""
    follows, yours = divmod(version, _VIEWS)
    return View(Rank(follows - 1), Rank(yours - 1)) if follows and yours else None


class Gateways:
    """What one worker knows of who trains and of gateways."""

    def __init__(self, own: Rank, groups: Sequence[Collection[Rank]]) -> None:
        self._own = own
        self.group_of = {rank: at for at, group in enumerate(groups) for rank in group}
        self.home = self.group_of[own]
        self._stepped_to: dict[Rank, int] = {}  # by local steps since it joined, by nothing else
        self._views: dict[Rank, View] = {}
        self._told: dict[Rank, View] = {}

    # ---- what is heard ---------------------------------------------------------------------------

    def stepped(self, rank: Rank, iteration: int, version: int) -> None:
        """That worker has done a local step, and says what it takes for gateways."""
        self._stepped_to[rank] = max(self._stepped_to.get(rank, 0), iteration)
        if (view := from_version(version)) is not None:
            self._views[rank] = view

    def gone(self, rank: Rank) -> None:
        """What it has said is void: it has left, or is there anew."""
        for known in (self._stepped_to, self._views, self._told):
            known.pop(rank, None)

    # ---- what follows ----------------------------------------------------------------------------

    def step_of(self, rank: Rank) -> int:
        """The last local step that it has done; 0: whether it trains is not known."""
        return self._stepped_to.get(rank, 0)

    def members(self, group: int, counted: Iterable[Rank]) -> list[Rank]:
        """Those of them that are of that group."""
        return [rank for rank in counted if self.group_of[rank] == group]

    def in_sight(self, group: int, counted: Iterable[Rank]) -> Rank | None:
        """The lowest of that group that trains, of those and this worker; None: nobody does."""
        trains = [rank for rank in self.members(group, counted) if self.step_of(rank)]
        return min([*trains, *([self._own] if group == self.home else [])], default=None)

    def gateway(self, counted: Collection[Rank]) -> tuple[Rank, bool]:
        """Whom this worker follows, and whether that is its site's gateway (itself, maybe) or
        stands in for one that this worker does not see training, as its link has broken."""
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
        """Who takes its results from this worker."""
        for rank in linked:
            view = self._views.get(rank)
            if view is not None and view.follows == self._own:
                yield rank

    def views(self, counted: Collection[Rank], linked: Collection[Rank]) -> dict[Rank, View]:
        """What each of those linked is to be told."""
        follows, _ = self.gateway(counted)
        lowest = {at: self.in_sight(at, counted) for at in {self.group_of[r] for r in linked}}
        views = {}
        for rank in linked:
            yours = lowest[self.group_of[rank]]
            views[rank] = View(follows, rank if yours is None else yours)
        return views

    def untold(self, views: Mapping[Rank, View]) -> dict[Rank, View]:
        """Those among the views that are not what was told last."""
        return {rank: view for rank, view in views.items() if self._told.get(rank) != view}

    def told(self, views: Mapping[Rank, View]) -> None:
        """Those have been told."""
        self._told.update(views)

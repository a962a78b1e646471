"""When groups of workers change: the one decider's part in `exchange.topology: clustered`.

Owns hysteresis. Called by the sidecar (`sidecar.groups`) of the worker that decides, with what
links carry; another sidecar that takes over begins with an empty memory, which delays a change and
does no harm. Pure: time is an argument.

A new grouping is made only where what links say fits it better than the present one by
`LEAST_GAIN`, in `PATIENCE` looks one after the other; the last one's is taken: what each comes to
may differ by a faded link. The first look of a run, which knows nothing but sites, needs no
patience. A gateway that is gone is replaced at once, by its group's best; groups stay as they are,
and when it is back it is an ordinary member.

Source: ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dlion_api.measurements import Grouping
from dlion_worker.policies.clusters import (
    KEPT_SEPARATION,
    SEPARATION,
    choose_gateways,
    find_groups,
    misfit,
    pairs_of,
    sorted_groups,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dlion_api.names import Rank
    from dlion_worker.policies.clusters import Groups

LOOK_S: Final = 5.0
PATIENCE: Final = 3
LEAST_GAIN: Final = 0.25
"""Of what the links of one worker say: so much must fit better. A move of one worker counts the
same however many others there are."""


class Regrouping:
    """What one decider has seen of late."""

    def __init__(self, decider: Rank) -> None:
        self._decider = decider
        self._looked_at_s = float("-inf")
        self._times = 0
        """Looks one after the other in which something else would fit better."""

    def look(
        self,
        present: Collection[Rank],
        rates: Mapping[tuple[Rank, Rank], float],
        held: Grouping,
        now_s: float,
    ) -> Grouping | None:
        """The next grouping, or None: `held` stands.

        `rates`: bytes per second of the pairs that are known, by their lower and higher rank. As
        long as a pair among those `present` is unknown nothing but a gateway's leaving counts.
        """
        if lost := self._without_lost_gateways(present, rates, held):
            self._times = 0
            return lost
        if now_s - self._looked_at_s < LOOK_S:
            return None
        known = {pair: rates[pair] for pair in pairs_of(present) if pair in rates}
        if len(present) < 2 or len(known) < len(pairs_of(present)):
            return None
        is_first = held.version == 0 and self._looked_at_s == float("-inf")
        self._looked_at_s = now_s
        wanted = self._better(present, known, held)
        self._times = 0 if wanted is None else self._times + 1
        if wanted is None or (self._times < PATIENCE and not is_first):
            return None
        self._times = 0
        return Grouping(held.version + 1, self._decider, *wanted)

    def _without_lost_gateways(
        self,
        present: Collection[Rank],
        rates: Mapping[tuple[Rank, Rank], float],
        held: Grouping,
    ) -> Grouping | None:
        """Where one is gone and its group is not."""
        pairs = zip(held.groups, held.gateways, strict=True)
        if all(gateway in present or not set(group) & set(present) for group, gateway in pairs):
            return None
        gateways = choose_gateways(held.groups, rates, present, held.gateways)
        return Grouping(held.version + 1, self._decider, held.groups, gateways)

    def _better(
        self,
        present: Collection[Rank],
        rates: Mapping[tuple[Rank, Rank], float],
        held: Grouping,
    ) -> tuple[Groups, tuple[Rank, ...]] | None:
        """Groups that fit what links carry better than those there are, or the same groups with
        better gateways; None: neither."""
        parted = len([group for group in held.groups if set(group) & set(present)]) > 1
        separation = KEPT_SEPARATION if parted and held.version > 0 else SEPARATION
        least = LEAST_GAIN * 2 / len(present)  # a link has two ends
        groups, wrong = held.groups, misfit(held.groups, rates, separation)
        if wrong >= least:  # else there is not so much to gain, and no need to search
            found = find_groups(rates, separation)
            if wrong - misfit(found, rates, separation) >= least:
                groups = _with_absent(found, held)
        gateways = choose_gateways(groups, rates, present, held.gateways)
        changed = (groups, gateways) != (held.groups, held.gateways)
        return (groups, gateways) if changed else None


def _with_absent(found: Groups, held: Grouping) -> Groups:
    """Who is not there goes with most of those with whom it was; alone it stays alone."""
    groups = [list(group) for group in found]
    known = {rank for group in found for rank in group}
    for before in held.groups:
        absent = [rank for rank in before if rank not in known]
        if not absent:
            continue
        shared = [len(set(before) & set(group)) for group in found]
        if max(shared):
            groups[shared.index(max(shared))] += absent
        else:
            groups.append(absent)
    return sorted_groups(groups)

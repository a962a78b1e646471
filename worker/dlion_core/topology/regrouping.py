"""When to change groups of workers, for `exchange.topology: clustered`; runs at the one decider.

Implements hysteresis. Called by the sidecar (`topology.grouping`) of the deciding worker with
measured link rates. A sidecar that takes over starts without memory, which only delays a change.
Pure: time is an argument.

A new grouping is made only if it fits the measured rates better than the current one by `MIN_GAIN`
in `PATIENCE` consecutive checks. The result of the last check is used; results may differ by a
temporarily slow link. The first check of a run, which knows only sites, needs no patience. A
gateway that has left is replaced at once by the best of its group. Groups stay unchanged, and on
return it is an ordinary member.

Source: this project.
"""

from collections.abc import Callable, Collection
from typing import Final

from dlion_api.names import Rank
from dlion_api.protocol.measurements import Grouping
from dlion_core.topology.clusters import (
    KEPT_SEPARATION,
    SEPARATION,
    Groups,
    PairRates,
    choose_gateways,
    find_groups,
    misfit,
    pairs_of,
    sorted_groups,
)

CHECK_INTERVAL_S: Final = 5.0
PATIENCE: Final = 3
MIN_GAIN: Final = 0.25
"""Required improvement, as a fraction of the links of one worker. Moving one worker counts the same
for any number of others."""


class Regrouping:
    """Recent observations of one decider."""

    def __init__(
        self,
        decider: Rank,
        *,
        find: Callable[[PairRates, float], Groups] = find_groups,
        patience: int = PATIENCE,
    ) -> None:
        """`find` returns groups for rates and the ratio of fast to slow ones that parts them."""
        self._decider, self._find, self._patience = decider, find, patience
        self._checked_s = float("-inf")
        self._times = 0
        """Consecutive checks in which another grouping fits better."""

    def is_due(self, now_s: float) -> bool:
        """Whether `check` would check the groups now."""
        return now_s - self._checked_s >= CHECK_INTERVAL_S

    def check(
        self, present: Collection[Rank], rates: PairRates, held: Grouping, now_s: float
    ) -> Grouping | None:
        """Return the next grouping, or None to keep `held`. While the rate of a pair of `present`
        workers is unknown, only the loss of a gateway causes a change."""
        if lost := self._without_lost_gateways(present, rates, held):
            self._times = 0
            return lost
        if not self.is_due(now_s):
            return None
        known = {pair: rates[pair] for pair in pairs_of(present) if pair in rates}
        if len(present) < 2 or len(known) < len(pairs_of(present)):
            return None
        is_first = held.version == 0 and self._checked_s == float("-inf")
        self._checked_s = now_s
        wanted = self._better(present, known, held)
        self._times = 0 if wanted is None else self._times + 1
        if wanted is None or (self._times < self._patience and not is_first):
            return None
        self._times = 0
        return Grouping(held.version + 1, self._decider, *wanted)

    def _without_lost_gateways(
        self, present: Collection[Rank], rates: PairRates, held: Grouping
    ) -> Grouping | None:
        """The grouping with replaced gateways, if one left and its group did not."""
        pairs = zip(held.groups, held.gateways, strict=True)
        if all(gateway in present or not set(group) & set(present) for group, gateway in pairs):
            return None
        gateways = choose_gateways(held.groups, rates, present, held.gateways)
        return Grouping(held.version + 1, self._decider, held.groups, gateways)

    def _better(
        self, present: Collection[Rank], rates: PairRates, held: Grouping
    ) -> tuple[Groups, tuple[Rank, ...]] | None:
        """Better groups for these rates, or the same groups with better gateways; None: neither."""
        parted = len([group for group in held.groups if set(group) & set(present)]) > 1
        separation = KEPT_SEPARATION if parted and held.version > 0 else SEPARATION
        least = MIN_GAIN * 2 / len(present)  # a link has two ends
        groups, wrong = held.groups, misfit(held.groups, rates, separation)
        if wrong >= least:  # else the possible gain is too small
            candidate = self._find(rates, separation)
            if wrong - misfit(candidate, rates, separation) >= least:
                groups = _with_absent(candidate, held)
        gateways = choose_gateways(groups, rates, present, held.gateways)
        changed = (groups, gateways) != (held.groups, held.gateways)
        return (groups, gateways) if changed else None


def _with_absent(candidate: Groups, held: Grouping) -> Groups:
    """Assign absent workers to the group of most of their former members, else to their own."""
    groups = [list(group) for group in candidate]
    known = {rank for group in candidate for rank in group}
    for before in held.groups:
        absent = [rank for rank in before if rank not in known]
        if not absent:
            continue
        shared = [len(set(before) & set(group)) for group in candidate]
        if max(shared):
            groups[shared.index(max(shared))] += absent
        else:
            groups.append(absent)
    return sorted_groups(groups)

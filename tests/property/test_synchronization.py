"""The peers that a worker waits for, in any order of events, against the recomputed definition.

The incrementally updated set of lagging peers is always that of the definition. A worker waits from
its step until no more than the spare peers lag, and not again before its next step.

Left out: single timelines (tests/unit/core/policies/test_synchronization.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_core.policies.synchronization import Synchronizer, SyncRule
from example_counts import examples

RULES = [
    SyncRule(slack=0, barrier=True),
    SyncRule(slack=0, spare=1, barrier=True),
    SyncRule(slack=0, spare=2, barrier=True),
    SyncRule(slack=2),
    SyncRule(slack=None),
]
EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["heard", "joined"]), st.integers(1, 4), st.integers(0, 12)),
    st.tuples(st.just("left"), st.integers(1, 4)),
)


@dataclass
class Definition:
    """Stores the events, and recomputes the rest."""

    rule: SyncRule
    own: int
    stepped: bool = False
    held: bool = False
    finished: dict[int, int] = field(default_factory=dict)
    in_step: dict[int, bool] = field(default_factory=dict)

    def lagging(self) -> set[int]:
        slack = self.rule.slack
        return {
            rank
            for rank, finished in self.finished.items()
            if slack is not None and self.in_step[rank] and finished < self.own - slack
        }

    def happens(self, event: tuple[object, ...]) -> None:
        match event:
            case ("step", int(more)):
                self.own, self.stepped, self.held = self.own + more, True, True
            case ("joined", int(rank), int(iteration)):
                self.finished[rank], self.in_step[rank] = iteration, not self.stepped
            case ("heard", int(rank), int(iteration)) if rank in self.finished:
                self.finished[rank] = max(self.finished[rank], iteration)
                slack = self.rule.slack
                self.in_step[rank] |= slack is None or self.finished[rank] >= self.own - slack - 1
            case ("left", int(rank)):
                self.finished.pop(rank, None)
        self.held = self.held and len(self.lagging()) > self.rule.spare


@settings(max_examples=examples(300), deadline=None)
@given(
    rule=st.sampled_from(RULES),
    resumed=st.sampled_from([0, 5]),
    events=st.lists(EVENTS, max_size=40),
)
def test_awaited_peers_are_those_of_the_definition(
    rule: SyncRule, resumed: int, events: list[tuple[object, ...]]
) -> None:
    worker, by_definition = Synchronizer(rule, iteration=resumed), Definition(rule, resumed)
    for event in events:
        match event:
            case ("step", int(more)) if not by_definition.held:
                worker.step_done(worker.own + more)
            case ("step", *_):
                continue
            case ("joined", int(rank), int(iteration)):
                worker.joined(Rank(rank), iteration)
            case ("heard", int(rank), int(iteration)):
                worker.heard(Rank(rank), iteration)
            case ("left", int(rank)):
                worker.left(Rank(rank))
        by_definition.happens(event)
        expected = by_definition.lagging() if by_definition.held else set()
        assert worker.waiting_for() == expected, event
        in_step = [rank for rank in sorted(by_definition.finished) if by_definition.in_step[rank]]
        assert worker.in_step() == in_step

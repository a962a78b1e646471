"""Tests of link budgets against a fluid queue in virtual time.

With more to send, a link is used to at least 90 %, and at most two budgets are in flight. A drop to
a quarter is followed within three iterations, and recovery is found. Links that share an uplink
keep within it. Unused shares go to other links. A budget is never zero.

Left out: TCP, real clocks, frames (tests/local); how a policy fills a budget.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from dlion_api.names import Rank
from dlion_api.protocol.measurements import LinkDelivery
from dlion_core.resource_control.budgets import MIN_BUDGET_BYTES, LinkBudgets
from dlion_core.resource_control.exchange_cost import SHORT_BYTES

ITERATION_S = 0.4
SLICES = 200
MBIT = 1e6 / 8
PLENTY = 10**12

Rates = Callable[[float], float]


class FluidNetwork:
    """Links that drain at the max-min fair share of one uplink, each under its own limit."""

    def __init__(self, uplink: Rates, limits: dict[int, Rates], demand: dict[int, int]) -> None:
        self.budgets = LinkBudgets(shared_uplink=True)
        self.budgets.set_peers(Rank(peer) for peer in limits)
        self.uplink, self.limits, self.demand = uplink, limits, demand
        self.queued = dict.fromkeys(limits, 0.0)
        self.now_s = 0.0
        self.max_bytes: float | None = None
        self.lateness: dict[int, Callable[[], float]] = {}
        """Map a round's busy time to the time that a throttled receiver reports."""

    def round(self) -> float:
        """Run one iteration; return the carried bytes as a fraction of the uplink."""
        self._send()
        before = dict(self.queued)
        busy_s, busy_bytes = dict.fromkeys(self.queued, 0.0), dict.fromkeys(self.queued, 0.0)
        possible = 0.0
        for _ in range(SLICES):
            slice_s = ITERATION_S / SLICES
            possible += self.uplink(self.now_s) * slice_s
            for peer, rate in self._fair_rates().items():
                moved = min(self.queued[peer], rate * slice_s)
                busy_bytes[peer] += moved
                busy_s[peer] += moved / rate if rate else slice_s
                self.queued[peer] -= moved
            self.now_s += slice_s
        for peer, under_way in self.queued.items():
            # A receiver reports only bytes that arrived.
            arrived = busy_bytes[peer] > 0
            self.budgets.deliver(
                LinkDelivery(
                    peer=Rank(peer),
                    acknowledged_bytes=round(before[peer]) - round(under_way),
                    busy_bytes=round(busy_bytes[peer]),
                    receiver_busy_s=busy_s[peer] * self._late(peer) if arrived else 0.0,
                    unacknowledged_bytes=round(under_way),
                )
            )
        self.budgets.end_round(wall_s=ITERATION_S, own_s=ITERATION_S, max_bytes=self.max_bytes)
        return sum(busy_bytes.values()) / max(1.0, possible)

    def _late(self, peer: int) -> float:
        return self.lateness[peer]() if peer in self.lateness else 1.0

    def _send(self) -> None:
        """Send like the exchange: at most one budget a round, at most one and a half in flight."""
        for peer, budget in self.current_budgets().items():
            room = max(0.0, 1.5 * budget - self.queued[peer])
            self.queued[peer] += min(budget, self.demand[peer], room)

    def current_budgets(self) -> dict[int, int]:
        known = self.budgets.budgets()
        return {peer: known.get(Rank(peer), 300_000) for peer in self.limits}

    def _fair_rates(self) -> dict[int, float]:
        left = self.uplink(self.now_s)
        waiting = sorted(
            (peer for peer, queued in self.queued.items() if queued > 0),
            key=lambda peer: self.limits[peer](self.now_s),
        )
        rates = {}
        while waiting:
            peer = waiting.pop(0)
            rates[peer] = min(self.limits[peer](self.now_s), left / (len(waiting) + 1))
            left -= rates[peer]
        return rates


def constant(rate: float) -> Rates:
    return lambda _: rate


def stepping(before: float, after: float, at_s: float) -> Rates:
    return lambda now_s: before if now_s < at_s else after


def equal_links(uplink: Rates, count: int, demand: int = PLENTY) -> FluidNetwork:
    return FluidNetwork(
        uplink,
        {peer: constant(1000 * MBIT) for peer in range(1, count + 1)},
        dict.fromkeys(range(1, count + 1), demand),
    )


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("rate_mbit", [1, 20, 200])
def test_with_more_to_send_an_uplink_is_used_to_nine_tenths(count: int, rate_mbit: int) -> None:
    network = equal_links(constant(rate_mbit * MBIT), count)
    used = [network.round() for _ in range(40)][10:]
    assert sum(used) / len(used) >= 0.9
    total = sum(network.budgets.budgets().values())
    assert total <= 1.05 * rate_mbit * MBIT * ITERATION_S + count * MIN_BUDGET_BYTES


def test_backlog_stays_within_two_budgets() -> None:
    network = equal_links(constant(20 * MBIT), 5)
    for _ in range(40):
        network.round()
        budgets = network.current_budgets()
        if network.now_s > 4:
            assert all(network.queued[peer] <= 2 * budgets[peer] for peer in budgets)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("phase", [0.0, 0.5])
def test_a_fourfold_drop_is_followed_within_three_iterations(count: int, phase: float) -> None:
    drop_s = (20 + phase) * ITERATION_S
    network = equal_links(stepping(20 * MBIT, 5 * MBIT, drop_s), count)
    while network.now_s < drop_s:
        network.round()
    for _ in range(3):
        network.round()
    total = sum(network.budgets.budgets().values())
    assert total <= 1.1 * 5 * MBIT * ITERATION_S
    used = [network.round() for _ in range(10)]
    assert sum(used) / len(used) >= 0.9


@pytest.mark.parametrize("count", [1, 5])
def test_a_fourfold_rise_is_followed_within_three_iterations(count: int) -> None:
    network = equal_links(stepping(5 * MBIT, 20 * MBIT, 20 * ITERATION_S), count)
    for _ in range(24):
        network.round()
    used = [network.round() for _ in range(10)]
    assert min(used) >= 0.9


def test_slow_links_leave_their_share_to_fast_ones() -> None:
    limits = {1: constant(2 * MBIT), 2: constant(100 * MBIT), 3: constant(100 * MBIT)}
    network = FluidNetwork(constant(20 * MBIT), limits, dict.fromkeys(limits, PLENTY))
    used = [network.round() for _ in range(30)][10:]
    assert sum(used) / len(used) >= 0.9
    budgets = network.current_budgets()
    assert budgets[1] == pytest.approx(2 * MBIT * ITERATION_S, rel=0.15)
    assert budgets[2] == pytest.approx(9 * MBIT * ITERATION_S, rel=0.15)


def test_throttled_receivers_take_nothing_from_the_others() -> None:
    """They read late: bytes received meanwhile seem to arrive all at once, or over a long time."""
    limits = {peer: constant((100 if peer <= 3 else 1.6) * MBIT) for peer in range(1, 6)}
    network = FluidNetwork(constant(50 * MBIT), limits, dict.fromkeys(limits, PLENTY))
    rng = random.Random(1)
    for peer in (4, 5):
        network.lateness[peer] = lambda: rng.choice([0.02, 0.3, 0.7, 1.0, 3.0])
    observed = []
    for _ in range(80):
        network.round()
        observed.append(network.current_budgets())
    fast = [budgets[peer] for budgets in observed[10:] for peer in (1, 2, 3)]
    share = (50 - 2 * 1.6) / 3 * MBIT * ITERATION_S
    assert min(fast) >= 0.6 * share
    assert sum(fast) / len(fast) == pytest.approx(share, rel=0.15)
    slow = [budgets[peer] for budgets in observed[10:] for peer in (4, 5)]
    assert sum(slow) / len(slow) == pytest.approx(1.6 * MBIT * ITERATION_S, rel=0.5)
    assert max(slow) <= 0.9 * share, "a burst was mistaken for a rate"


def test_a_link_with_little_to_send_leaves_its_share_to_the_other_link() -> None:
    network = equal_links(constant(20 * MBIT), 2)
    network.demand[1] = round(2 * MBIT * ITERATION_S)
    used = [network.round() for _ in range(40)][20:]
    assert sum(used) / len(used) >= 0.88


def test_all_budgets_together_stay_within_the_affordable_bytes() -> None:
    network = equal_links(constant(20 * MBIT), 3)
    network.max_bytes = 300_000
    for _ in range(20):
        network.round()
    assert network.budgets.is_limited
    assert sum(network.current_budgets().values()) == pytest.approx(300_000, rel=0.01)
    network.max_bytes = 3_000_000
    used = [network.round() for _ in range(30)][20:]
    assert not network.budgets.is_limited
    assert sum(used) / len(used) >= 0.9


def test_slow_links_are_not_starved_by_the_cost_of_others() -> None:
    limits = {1: constant(48 * MBIT), 2: constant(48 * MBIT), 3: constant(MBIT)}
    network = FluidNetwork(constant(1000 * MBIT), limits, dict.fromkeys(limits, PLENTY))
    for _ in range(20):
        network.round()
    carried = network.current_budgets()[3]
    assert carried < SHORT_BYTES
    network.max_bytes = 300_000
    for _ in range(20):
        network.round()
    budgets = network.current_budgets()
    assert budgets[3] == pytest.approx(carried, rel=0.1)
    assert SHORT_BYTES <= budgets[1] <= 150_000


def test_links_with_little_to_send_are_limited_too() -> None:
    """Budgets far above the sent bytes would let the next long message through."""
    network = equal_links(constant(200 * MBIT), 3, demand=200_000)
    for _ in range(20):
        network.round()
    assert min(network.current_budgets().values()) > 200_000
    network.max_bytes = 300_000
    for _ in range(4):
        network.round()
    assert sum(network.current_budgets().values()) <= 1.01 * 300_000


def test_one_link_that_drops_does_not_cut_the_others() -> None:
    limits = {1: stepping(10 * MBIT, 1 * MBIT, 8.0), 2: constant(10 * MBIT)}
    network = FluidNetwork(constant(1000 * MBIT), limits, dict.fromkeys(limits, PLENTY))
    while network.now_s < 8.0 + 10 * ITERATION_S:
        network.round()
    budgets = network.current_budgets()
    assert budgets[1] <= 1.1 * MBIT * ITERATION_S
    assert budgets[2] >= 0.9 * 10 * MBIT * ITERATION_S


def test_a_link_that_stops_keeps_a_small_budget_and_recovers() -> None:
    network = equal_links(lambda now_s: 0.0 if 8.0 <= now_s < 16.0 else 20 * MBIT, 1)
    while network.now_s < 15.9:
        network.round()
    assert network.current_budgets()[1] == MIN_BUDGET_BYTES
    for _ in range(12):
        network.round()
    assert network.current_budgets()[1] >= 0.9 * 20 * MBIT * ITERATION_S


def test_messages_too_small_to_time_still_raise_the_budget() -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1)])
    budgets.resume({Rank(1): 1.0})
    for _ in range(10):
        sent = budgets.budgets()[Rank(1)]
        budgets.deliver(LinkDelivery(Rank(1), sent, 0, 0.0, sent))
        budgets.end_round(wall_s=0.4, own_s=0.4)
    assert budgets.budgets()[Rank(1)] >= 100 * MIN_BUDGET_BYTES


def test_waiting_for_peers_does_not_raise_a_budget() -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1)])
    for wall_s in (0.4, 0.4, 2.0, 4.0):
        budgets.deliver(LinkDelivery(Rank(1), 400_000, 400_000, 0.4, 0))
        budgets.end_round(wall_s=wall_s, own_s=0.4)
        assert budgets.budgets()[Rank(1)] == pytest.approx(400_000)


def test_a_probe_gives_the_first_budgets_which_share_the_uplink() -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1), Rank(2)])
    assert budgets.budgets() == {}
    budgets.probed(Rank(1), 100_000, 0.1)
    budgets.probed(Rank(2), 100_000, 0.1)
    assert budgets.budgets() == {Rank(1): 500_000, Rank(2): 500_000}


def test_links_without_a_shared_uplink_keep_their_whole_rate() -> None:
    budgets = LinkBudgets(shared_uplink=False)
    budgets.set_peers([Rank(1), Rank(2)])
    budgets.deliver(LinkDelivery(Rank(1), 100_000, 100_000, 0.1, 0))
    budgets.deliver(LinkDelivery(Rank(2), 100_000, 100_000, 0.4, 0))
    budgets.end_round(wall_s=0.4, own_s=0.4)
    assert budgets.budgets() == {Rank(1): 400_000, Rank(2): 100_000}


def test_a_fraction_of_the_rate_is_left_to_others() -> None:
    network = equal_links(constant(20 * MBIT), 3)
    network.budgets = LinkBudgets(shared_uplink=True, fraction=0.25)
    network.budgets.set_peers([Rank(1), Rank(2), Rank(3)])
    used = [network.round() for _ in range(40)][10:]
    assert sum(used) / len(used) == pytest.approx(0.25, rel=0.1)


def test_a_peer_that_has_left_has_no_budget() -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1), Rank(2)])
    budgets.resume({Rank(1): 1e6, Rank(2): 1e6})
    budgets.set_peers([Rank(2)])
    budgets.deliver(LinkDelivery(Rank(1), 100_000, 100_000, 0.1, 0))
    assert set(budgets.budgets()) == {Rank(2)}


def test_a_peer_that_returns_begins_at_its_old_rate() -> None:
    budgets = LinkBudgets(shared_uplink=False)
    budgets.set_peers([Rank(1), Rank(2)])
    budgets.resume({Rank(1): 1e6, Rank(2): 1e6})
    budgets.set_peers([Rank(2)])
    budgets.set_peers([Rank(1), Rank(2)])
    assert budgets.budgets() == {Rank(1): 1_000_000, Rank(2): 1_000_000}


@pytest.mark.parametrize(("together", "expected"), [(1.0, 400_000), (0.5, 200_000)])
def test_with_auto_the_shared_rate_is_measured(together: float, expected: int) -> None:
    """Two links of 1 MB/s each: at full rate side by side, they share nothing. The second one ends
    early. If the links were shared, their budgets would be cut by how little they overlap.
    """
    budgets = LinkBudgets(shared_uplink=None)
    budgets.set_peers([Rank(1), Rank(2)])
    for peer in (Rank(1), Rank(2)):
        budgets.probed(peer, 100_000, 0.1)
    rate = 1e6 * together
    for _ in range(4):
        budgets.deliver(LinkDelivery(Rank(1), round(rate * 0.4), round(rate * 0.4), 0.4, 0))
        budgets.deliver(LinkDelivery(Rank(2), round(rate * 0.1), round(rate * 0.1), 0.1, 0))
        budgets.end_round(wall_s=0.4, own_s=0.4)
    cut = 1.0 if together == 1.0 else 0.25 / 0.34  # 0.25 MB in 0.34 s, each by its bytes
    assert budgets.budgets()[Rank(1)] == pytest.approx(expected * cut, rel=0.01)


def test_links_of_one_uplink_with_random_differences_have_the_same_budget() -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1), Rank(2), Rank(3)])
    budgets.resume({Rank(1): 0.98e6, Rank(2): 1.02e6, Rank(3): 2e6})
    found = budgets.budgets()
    assert found[Rank(1)] == found[Rank(2)] < found[Rank(3)]
    apart = LinkBudgets(shared_uplink=False)
    apart.set_peers([Rank(1), Rank(2)])
    apart.resume({Rank(1): 0.98e6, Rank(2): 1.02e6})
    assert apart.budgets() == {Rank(1): 980_000, Rank(2): 1_020_000}


def test_all_reports_of_a_round_count() -> None:
    """A link is reported more than once in a long iteration: bytes and busy time add up."""
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1)])
    for busy_s in (0.1, 0.3):
        budgets.deliver(LinkDelivery(Rank(1), 100_000, 100_000, busy_s, 0))
    budgets.end_round(wall_s=1.0, own_s=1.0)
    assert budgets.bandwidths() == {1: pytest.approx(500_000)}


@pytest.mark.parametrize(
    ("busy_s", "backlog_bytes", "expected"),
    [
        ([0.004, 0.04, 0.1, 0.02, 0.004, 0.03, 0.5], 0, 2e6),  # sometimes the receiver is busy
        (
            [0.001, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
            0,
            80_000,
        ),  # one is read late, all at once
        ([0.4], 8_000, 20_000),  # others wait behind it
        ([0.001, 0.001, 0.04, 0.001, 0.002], 0, 4e6),  # the link is faster from here
    ],
)
def test_short_transfers_lower_a_rate_together(
    busy_s: list[float], backlog_bytes: int, expected: float
) -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1)])
    budgets.probed(Rank(1), 200_000, 0.1)
    delays_s = itertools.cycle(busy_s)
    for _ in range(20):
        budgets.deliver(LinkDelivery(Rank(1), 0, 0, 0.0, 8_000 + backlog_bytes))
        budgets.end_round(wall_s=0.5, own_s=0.5)
        budgets.deliver(LinkDelivery(Rank(1), 8_000, 8_000, next(delays_s), backlog_bytes))
        budgets.end_round(wall_s=0.5, own_s=0.5)
    assert budgets.bandwidths()[Rank(1)] == pytest.approx(expected, rel=0.2)


def test_virtual_receivers_read_immediately() -> None:
    budgets = LinkBudgets(shared_uplink=True, receiver_delay_s=0.0)
    budgets.set_peers([Rank(1)])
    budgets.probed(Rank(1), 200_000, 0.1)
    for _ in range(20):
        budgets.deliver(LinkDelivery(Rank(1), 4_000, 4_000, 0.1, 0))
        budgets.end_round(wall_s=0.5, own_s=0.5)
    assert budgets.bandwidths()[Rank(1)] == pytest.approx(40_000, rel=0.01)


def test_a_message_of_several_iterations_does_not_suggest_a_fast_link() -> None:
    budgets = LinkBudgets(shared_uplink=True, fraction=0.3)
    budgets.set_peers([Rank(1)])
    budgets.probed(Rank(1), 50_000, 0.1)
    for _ in range(20):
        unacknowledged_bytes = 4 * budgets.budgets()[Rank(1)]
        budgets.deliver(LinkDelivery(Rank(1), 0, 0, 0.0, unacknowledged_bytes))
        budgets.end_round(wall_s=0.5, own_s=0.2)
        budgets.deliver(LinkDelivery(Rank(1), unacknowledged_bytes, 1_000, 0.002, 0))
        budgets.end_round(wall_s=0.5, own_s=0.2)
    assert budgets.bandwidths()[Rank(1)] == pytest.approx(500_000)


def test_a_probe_resets_the_judgement_of_short_transfers() -> None:
    budgets = LinkBudgets(shared_uplink=True)
    budgets.set_peers([Rank(1)])
    budgets.probed(Rank(1), 200_000, 0.1)
    for turn in range(8):
        if turn == 7:  # seven slow ones do not outweigh the rate of the probe
            budgets.probed(Rank(1), 200_000, 0.1)
        budgets.deliver(LinkDelivery(Rank(1), 8_000, 8_000, 0.1, 0))
        budgets.end_round(wall_s=0.5, own_s=0.5)
    assert budgets.bandwidths()[Rank(1)] == pytest.approx(2e6)

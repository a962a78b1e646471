"""Test the arithmetic of imposed rates and quotas.

- The rate of a pacer holds for all sizes and times of its input. A late wake-up is compensated by 3
  % at most.
- A worker's CPU account keeps the quota on average. It neither stops permanently nor accumulates
  credit. Mean quotas cover several periods.

Left out: sockets, signals, clocks (tests/local).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_local.emulation.compute.duty_cycle import CYCLE_S, CpuBudget
from dlion_local.emulation.measurement import QuotaUsage, TransferMeasurement
from dlion_local.emulation.network.relay import BURST_S, Pacer
from dlion_local.emulation.network.traffic_shaping import gso_bytes, queue_bytes
from example_counts import examples
from transfer_windows import windows_bytes_per_s


@given(
    rate=st.floats(1e3, 1e8),
    arrivals=st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 65536)), min_size=1, max_size=60),
)
def test_a_pacer_never_lets_more_pass_than_its_rate_and_burst(
    rate: float, arrivals: list[tuple[float, int]]
) -> None:
    pacer, now_s, passed = Pacer(rate), 100.0, []
    for gap_s, size in arrivals:
        now_s += gap_s
        passed.append((max(now_s, pacer.reserve(size, now_s)), size))
    for first, (from_s, _) in enumerate(passed):
        inside = 0
        for at_s, size in passed[first:]:
            # All but the last one had to pass by the time the last one began.
            assert inside <= rate * (at_s - from_s + BURST_S) * (1 + 1e-6) + 1
            inside += size


def test_a_new_rate_applies_to_waiting_input() -> None:
    pacer = Pacer(1000.0)
    pacer.reserve(2000, now_s=5.0)
    pacer.set_rate(100.0, now_s=5.0)
    assert pacer.reserve(1, now_s=5.0) == pytest.approx(5.0 + (2 - BURST_S) * 10)


@settings(max_examples=examples(40), deadline=None)
@given(
    quota=st.floats(0.02, 4.0),
    busy_cores=st.floats(0.0, 4.0),
    late_s=st.floats(0.0, 0.02),
)
def test_an_account_keeps_to_its_quota(quota: float, busy_cores: float, late_s: float) -> None:
    account, used_s, now_s, last_s = CpuBudget(quota), 0.0, 0.0, 0.0
    while now_s < 10.0:
        passed_s, last_s = now_s - last_s, now_s
        burnt_s = passed_s * busy_cores if account.running else 0.0
        used_s += burnt_s
        alone_s = account.update(passed_s, burnt_s, processors=4)
        assert alone_s > 0 or not account.running
        now_s += max(0.002, min(0.1, alone_s)) + late_s
    # The next turn compensates a late one: only the last may exceed the quota.
    assert used_s <= quota * (10.0 + CYCLE_S) + 4 * (0.12 + late_s)
    if busy_cores >= quota * 1.5:
        assert used_s >= quota * 10.0 * 0.9 - 0.2
    else:
        assert used_s >= 0.9 * min(busy_cores, quota) * 10.0 * 0.7 - 1e-3


def test_an_idle_worker_saves_up_no_more_than_one_cycle() -> None:
    account = CpuBudget(0.5)
    account.update(1000.0, 0.0, processors=2)
    assert account.credit_s == pytest.approx(0.5 * CYCLE_S)


def test_each_quota_is_listed_with_the_mean_use_while_it_applied() -> None:
    ledger = QuotaUsage()
    assert ledger.figures(Rank(0)) == []
    ledger.begin_quota(0.5, now_s=10.0, used_s=3.0)  # three seconds of imports do not count
    ledger.begin_quota(None, now_s=14.0, used_s=4.0)  # released while it restarts
    ledger.begin_quota(0.5, now_s=24.0, used_s=13.0)
    ledger.begin_quota(0.2, now_s=30.0, used_s=15.0, throttled_s=2.0, begins_s=20.0)
    ledger.update(now_s=35.0, used_s=15.5, throttled_s=4.0)
    ledger.begin_quota(None, now_s=40.0, used_s=16.0, throttled_s=7.0, begins_s=20.0)
    ledger.update(now_s=99.0, used_s=50.0)  # released: it no longer counts
    first, second = ledger.figures(Rank(0))
    assert (first.begins_s, first.requested) == (0.0, 0.5)
    assert first.measured == pytest.approx(0.3)
    assert first.note == "mean over 10 s, waiting included; held back for 2.0 s"
    assert (second.begins_s, second.requested) == (20.0, 0.2)
    assert second.measured == pytest.approx(0.1)
    assert second.note == "mean over 10 s, waiting included; held back for 5.0 s"


@pytest.mark.parametrize("begins_s", [0.0, 20.0])
def test_of_two_quotas_from_one_time_the_later_one_has_what_was_used_under_it(
    begins_s: float,
) -> None:
    """An environment may change links and cores in two entries of one time, also at the start."""
    ledger = QuotaUsage()
    ledger.begin_quota(4.0, now_s=10.0, used_s=0.0, begins_s=begins_s)
    ledger.begin_quota(2.0, now_s=12.0, used_s=8.0, begins_s=begins_s)
    ledger.update(now_s=32.0, used_s=48.0)
    rows = [(one.begins_s, one.requested, one.measured) for one in ledger.figures(Rank(0))]
    assert rows == [(begins_s, 4.0, 4.0), (begins_s, 2.0, 2.0)]


def test_the_rate_of_a_transfer_omits_its_beginning() -> None:
    arrivals = [(0.0, 0), (0.5, 10), (1.0, 110), (1.5, 210), (2.0, 310)]
    one = TransferMeasurement(Rank(0), Rank(1), arrivals)
    assert one.bytes_per_s(skip_s=0.5) == 200.0
    assert max(windows_bytes_per_s(one, 1.0)) == 200.0
    assert TransferMeasurement(Rank(0), Rank(1)).bytes_per_s() == 0.0


def test_segments_take_about_a_millisecond_and_queues_about_forty() -> None:
    twenty_mbit = 2.5e6
    assert gso_bytes(twenty_mbit) == 3028  # two frames: the minimum
    assert gso_bytes(1.25e8) == 65536  # the maximum that the stack creates
    assert queue_bytes(twenty_mbit) == 100_000
    assert queue_bytes(twenty_mbit, sharing_count=5) == 16 * 1514

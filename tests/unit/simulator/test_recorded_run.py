"""Tests of the conditions found from a run's records: speeds, rates, times.

Left out: real records (tests/local/test_replay.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.errors import DataError
from dlion_api.names import Rank
from dlion_api.protocol.progress import (
    DirectiveRecord,
    EventRecord,
    LinkRecord,
    ProgressRecord,
    StepRecord,
)
from dlion_api.spec import load_job
from dlion_environments.plan import Conditions
from dlion_simulator.calibration.recorded_run import (
    CHANGE_FRACTION,
    SETTLED_S,
    WINDOW_S,
    Latencies,
    RecordedConditions,
    recorded_plan,
)
from dlion_simulator.network import WIRE_EFFICIENCY
from local_run import job_document

BEGAN_S = 10.0
PROBED_S = 1.75
"""Between the report of the start of training and the first step."""


def step(rank: int, time_s: float, *, compute_s: float = 0.2, **fields: Any) -> StepRecord:
    """A step of 40 samples that took 0.3 s: computing, and 0.04 s of waiting."""
    values: dict[str, Any] = {
        "time_s": time_s, "rank": Rank(rank), "incarnation": 1, "iteration": 1, "loss": 1.0,
        "local_batch_size": 40, "global_batch_size": 80, "learning_rate": 0.1,
        "compute_s": compute_s, "wall_s": compute_s + 0.1, "cpu_s": 0.1, "exchange_cpu_s": 0.0,
        "waited_s": 0.04, "samples": 40,
    }  # fmt: skip
    return StepRecord(**{**values, **fields})


def directive(rank: int, time_s: float, rates: dict[int, float]) -> DirectiveRecord:
    bandwidth = {Rank(peer): rate for peer, rate in rates.items()}
    return DirectiveRecord(time_s, Rank(rank), 1, 40, 80, bandwidth_bytes_per_s=bandwidth)


def link(rank: int, peer: int, time_s: float, sent_bytes: int) -> LinkRecord:
    return LinkRecord(time_s, Rank(rank), Rank(peer), 1, sent_bytes, 0, 0, 0, None, None, 0, True)


def started() -> list[ProgressRecord]:
    return [EventRecord(BEGAN_S - PROBED_S, Rank(0), 0, "TrainingStarted", "")]


def plan_of(
    records: list[ProgressRecord],
    workers: int = 2,
    *,
    has_quotas: bool = False,
    latencies: Latencies = ((0.0, {}),),
) -> RecordedConditions:
    job = load_job(job_document(workers), source="test")
    return recorded_plan(
        records, job.workers(), latencies=latencies, has_quotas=has_quotas, source="runs/a"
    )


def steady() -> list[ProgressRecord]:
    """Two workers of 200 and 100 samples/s for 20 s, links of 1 and 2 MB/s."""
    return [
        directive(0, 5.0, {1: 1e6}),
        directive(1, 5.0, {0: 2e6}),
        *started(),
        *(step(0, BEGAN_S + 0.5 + 0.3 * k) for k in range(60)),
        *(step(1, BEGAN_S + 0.5 + 0.3 * k, compute_s=0.4) for k in range(60)),
    ]


def test_a_steady_run_has_one_set_of_conditions() -> None:
    recorded = plan_of(steady())
    assert recorded.plan.changes == ()
    assert recorded.began_s == BEGAN_S, "the start of the first step, not the report of it"
    assert recorded.unknown_links == ()
    conditions = recorded.plan.initial
    assert [worker.quota_cores for worker in conditions.workers] == pytest.approx([200, 100])
    assert carries(conditions, 0, 1) == pytest.approx(1e6)
    assert carries(conditions, 1, 0) == pytest.approx(2e6)


def carries(conditions: Conditions, sender: int, receiver: int) -> float:
    """Bytes of payload a second, as a simulated network counts a plan's pipes."""
    return conditions.link_bytes_per_s(Rank(sender), Rank(receiver)) * WIRE_EFFICIENCY


def test_the_time_of_a_step_beside_computing_is_a_fixed_cost_for_all() -> None:
    """0.06 s of neither computing nor waiting: the time of 12 samples of one worker, 6 of the
    other.
    """
    recorded = plan_of(steady())
    assert 6 <= recorded.exchange_core_s <= 12
    assert recorded.fixed_core_s == 0


def test_under_a_quota_cpu_time_gives_the_cost_and_the_sidecar_the_speed() -> None:
    """A quarter and half a core. A step costs 5 ms, a sample 1 ms, an exchange 8 ms. Because of
    bursts, computing looks twice as fast as the quota allows.
    """
    batches = {0: 20, 1: 60}
    quotas = {0: 0.25, 1: 0.5}
    records: list[ProgressRecord] = started()
    for rank, batch in batches.items():
        cpu_s = 0.005 + 0.001 * batch
        capacity = quotas[rank] * batch / cpu_s
        own = {Rank(rank): capacity}
        records.append(
            DirectiveRecord(5.0, Rank(rank), 1, batch, 80, {}, own, {Rank(1 - rank): 1e6})
        )
        records += [
            step(
                rank, BEGAN_S + 0.3 * k, compute_s=cpu_s / 2 / quotas[rank],
                local_batch_size=batch, cpu_s=cpu_s + 0.008, exchange_cpu_s=0.008,
            )
            for k in range(40)
        ]  # fmt: skip
    recorded = plan_of(records, has_quotas=True)
    assert recorded.exchange_core_s == pytest.approx(0.008)
    assert recorded.fixed_core_s == pytest.approx(0.005)
    assert recorded.plan.samples_per_s_per_core == pytest.approx(1000)
    cores = [worker.quota_cores for worker in recorded.plan.initial.workers]
    assert cores == pytest.approx([0.25, 0.5])
    without_directives = [r for r in records if not isinstance(r, DirectiveRecord)]
    assert plan_of(without_directives, has_quotas=True) == plan_of(without_directives)


def test_under_a_quota_the_exchange_costs_by_the_bytes_of_each_worker() -> None:
    """Both send 1 MB. One pays 8 ms of CPU in each of 40 steps for sent and received bytes."""
    records: list[ProgressRecord] = started()
    for rank in (0, 1):
        capacity = {Rank(rank): 100.0}
        records.append(
            DirectiveRecord(5.0, Rank(rank), 1, 40, 80, {}, capacity, {Rank(1 - rank): 1e6})
        )
        costs_s = 0.008 * (1 + rank)
        records += [
            step(rank, BEGAN_S + 0.3 * k, cpu_s=0.1 + costs_s, exchange_cpu_s=costs_s)
            for k in range(40)
        ]
        records += [link(rank, 1 - rank, BEGAN_S + k, 250_000) for k in range(4)]
    recorded = plan_of(records, has_quotas=True)
    assert recorded.exchange_core_s == 0.0
    by_byte = recorded.exchange_core_s_per_byte
    assert by_byte == pytest.approx({0: 40 * 0.008 / 2e6, 1: 40 * 0.016 / 2e6})


def test_a_change_applies_from_its_window_on_counted_from_the_first_step() -> None:
    slower = BEGAN_S + 12.0
    records = [
        directive(0, 5.0, {1: 1e6}),
        directive(0, slower, {1: 0.25e6}),
        *started(),
        *(step(rank, BEGAN_S + 0.25 * k) for k in range(48) for rank in (0, 1)),
        *(step(0, slower + 0.25 * k, compute_s=0.8) for k in range(32)),
    ]
    recorded = plan_of(records)
    (change,) = recorded.plan.changes
    assert change.time_s == pytest.approx(12.0, abs=WINDOW_S)
    before, after = recorded.plan.initial, change.conditions
    assert (before.worker(Rank(0)).quota_cores, after.worker(Rank(0)).quota_cores) == (
        pytest.approx(200),
        pytest.approx(50),
    )
    assert after.worker(Rank(1)).quota_cores == pytest.approx(200)
    assert carries(before, 0, 1) == pytest.approx(1e6)
    assert carries(after, 0, 1) == pytest.approx(0.25e6)
    assert recorded.unknown_links == ((1, 0),)
    assert carries(after, 1, 0) == float("inf")


def test_latencies_change_at_the_times_of_the_environment() -> None:
    link = (Rank(0), Rank(1))
    recorded = plan_of(steady(), latencies=[(0.0, {link: 0.05}), (3.0, {link: 0.2})])
    (change,) = recorded.plan.changes
    assert change.time_s == 3.0 - PROBED_S
    found = [one.worker(Rank(0)).latency_s for one in (recorded.plan.initial, change.conditions)]
    assert found == [{1: 0.05}, {1: 0.2}]
    assert not recorded.plan.initial.worker(Rank(1)).latency_s


def test_the_rate_of_a_probe_is_not_the_rate_of_a_link() -> None:
    """Workers probe at the same time: a link carries three times as much once they train."""
    risen = [directive(0, BEGAN_S + after_s, {1: 3e6}) for after_s in (SETTLED_S / 2, SETTLED_S)]
    recorded = plan_of([*steady(), *risen])
    assert carries(recorded.plan.initial, 0, 1) == pytest.approx(3e6)
    assert recorded.plan.changes == ()
    assert recorded.plan.probed_bytes_per_s == {(0, 1): 1e6, (1, 0): 2e6}


def test_small_changes_are_ignored() -> None:
    little = 1 + CHANGE_FRACTION / 2
    records = [*steady(), step(0, BEGAN_S + 30, compute_s=0.2 * little)]
    assert plan_of([*records, directive(0, BEGAN_S + 30, {1: 1e6 * little})]).plan.changes == ()


def test_unknown_ranks_and_invalid_records_are_left_out() -> None:
    """They are ranks that the manifest lacks, steps without time, and rates of zero."""
    odd = [step(7, 12.0), directive(0, 12.0, {9: 1e6, 1: 0.0}), step(0, 12.0, compute_s=0.0)]
    assert plan_of([*steady(), *odd]).plan == plan_of(steady()).plan


def test_a_worker_without_a_step_is_named() -> None:
    with pytest.raises(DataError, match=r"runs/a: no step of worker 2 is recorded"):
        plan_of(steady(), workers=3)

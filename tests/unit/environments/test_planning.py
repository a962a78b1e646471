"""Test the plans that environments give.

- Quotas sum to the stated share of the machine. Each link passes its pipes, and the workers of a
  site share some of them. Latencies, cuts and changes have their times.
- An environment that contradicts the job is refused; the message names both.

Left out: reading files (test_loading), applying plans (tests/local).
"""

from __future__ import annotations

from typing import Any

import pytest

from dlion_api.document import parse
from dlion_api.errors import SpecError
from dlion_api.names import Rank, SiteName, WorkerIdentity
from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_environments.plan import unlimited_plan

MBIT = 125_000


def workers(*counts: int) -> tuple[WorkerIdentity, ...]:
    sites = [(site, index) for site, count in enumerate(counts) for index in range(count)]
    return tuple(
        WorkerIdentity(Rank(rank), SiteName(f"site-{site}"), "g", index)
        for rank, (site, index) in enumerate(sites)
    )


def environment(**fields: Any) -> Environment:
    return parse(Environment, {"name": "test", "workers": [{"count": 4, "cores": 1}], **fields})


@pytest.mark.parametrize("machine_cores", [2, 16])
def test_all_quotas_are_four_fifths_of_the_machine_less_the_sidecars(machine_cores: int) -> None:
    plan = load_environment("hetero-sys-a").plan(workers(6), machine_cores)
    quotas = [worker.quota_cores or 0.0 for worker in plan.initial.workers]
    assert sum(quotas) == pytest.approx(0.8 * machine_cores - 6 * 0.02)
    assert quotas[0] / quotas[5] == pytest.approx(24 / 4)
    assert quotas[0] / plan.core_scale == pytest.approx(24)


def test_an_explicit_core_scale_is_used_unchanged() -> None:
    plan = environment(coreScale=0.5).plan(workers(4), 2)
    assert [worker.quota_cores for worker in plan.initial.workers] == [0.5] * 4


def test_a_too_small_machine_is_refused_with_a_sufficient_scale() -> None:
    with pytest.raises(SpecError, match=r"coreScale of 0\.01 or more") as caught:
        environment(workers=[{"cores": 500}, {"cores": 2}]).plan(workers(2), 1)
    assert "environment test" in str(caught.value)


def test_a_link_has_the_smaller_of_the_senders_uplink_and_the_receivers_downlink() -> None:
    plan = load_environment("hetero-net-a").plan(workers(6), 8)
    rate = plan.initial.link_bytes_per_s
    assert rate(Rank(0), Rank(1)) == 50 * MBIT
    assert rate(Rank(0), Rank(2)) == 35 * MBIT
    assert rate(Rank(5), Rank(0)) == 20 * MBIT


def test_a_workers_links_share_its_rate() -> None:
    plan = load_environment("homo-b").plan(workers(6), 8)
    (uplink,) = plan.initial.worker(Rank(2)).uplink
    assert uplink.peers == {0, 1, 3, 4, 5}
    assert uplink.bytes_per_s == 50 * MBIT


def test_with_a_rate_per_peer_every_link_has_its_own_pipe() -> None:
    made = environment(workers=[{"count": 3, "cores": 1, "mbitPerS": 7}], linkShape="perPeer")
    pipes = made.plan(workers(3), 8).initial.worker(Rank(0)).uplink
    assert [(pipe.peers, pipe.bytes_per_s) for pipe in pipes] == [
        ({1}, 7 * MBIT),
        ({2}, 7 * MBIT),
    ]


def test_sites_have_rates_inside_and_between_and_latency() -> None:
    conditions = load_environment("two-clouds").plan(workers(3, 1), 8).initial
    assert conditions.link_bytes_per_s(Rank(0), Rank(1)) == 1000 * MBIT
    assert conditions.link_bytes_per_s(Rank(0), Rank(3)) == 20 * MBIT
    assert conditions.worker(Rank(0)).latency_s == {3: 0.01}
    assert conditions.worker(Rank(3)).latency_s == {0: 0.01, 1: 0.01, 2: 0.01}
    between = [pipe for pipe in conditions.worker(Rank(3)).uplink if pipe.peers == {0, 1, 2}]
    assert [pipe.bytes_per_s for pipe in between] == [20 * MBIT]


def test_the_workers_of_a_site_share_one_pipe_to_the_others_each_way() -> None:
    conditions = load_environment("two-clouds").plan(workers(3, 1), 8).initial
    rates = [
        {pipe.bytes_per_s for _, pipe in conditions.pipes(Rank(0), Rank(peer))} for peer in (1, 3)
    ]
    assert rates == [{1000 * MBIT}, {20 * MBIT}]
    keys = {
        link: [key for key, _ in conditions.pipes(Rank(link[0]), Rank(link[1]))]
        for link in ((0, 3), (1, 3), (3, 0), (3, 1), (0, 1), (2, 1))
    }
    assert keys[0, 3] == keys[1, 3]
    assert keys[3, 0] == keys[3, 1]
    assert not {*keys[0, 3]} & {*keys[3, 0]}
    inside = {*keys[0, 1], *keys[2, 1]}
    assert len(inside) == 3, "an uplink of each sender, and one downlink"
    assert not inside & {*keys[0, 3], *keys[3, 0]}


def test_a_site_of_one_worker_shares_nothing() -> None:
    conditions = load_environment("two-clouds").plan(workers(3, 1), 8).initial
    assert [len(pipe.sharers) for pipe in conditions.worker(Rank(3)).uplink] == [0]
    assert [len(pipe.sharers) for pipe in conditions.worker(Rank(0)).uplink] == [0, 3]


def test_a_worker_of_a_site_keeps_its_own_rate() -> None:
    made = environment(
        workers=[{"cores": 1}, {"cores": 1, "mbitPerS": 5}, {"count": 2, "cores": 1}],
        sites=[{"name": "a", "workers": 2}, {"name": "b", "workers": 2}],
        betweenSites={"mbitPerS": 20},
    )
    conditions = made.plan(workers(2, 2), 8).initial
    links = [(0, 2), (1, 2), (2, 1), (0, 1), (2, 3)]
    assert [conditions.link_bytes_per_s(Rank(a), Rank(b)) / MBIT for a, b in links] == [
        20, 5, 5, 5, float("inf"),
    ]  # fmt: skip
    shared = {key for a, b in ((0, 2), (1, 2)) for key, _ in conditions.pipes(Rank(a), Rank(b))}
    assert len(shared) == 3, "the site's uplink, the other site's downlink, and the slow worker's"


def test_with_a_rate_per_peer_a_site_shares_nothing() -> None:
    made = environment(betweenSites={"mbitPerS": 20}, linkShape="perPeer")
    conditions = made.plan(workers(2, 2), 8).initial
    keys = [
        key
        for sender in (0, 1)
        for receiver in (2, 3)
        for key, pipe in conditions.pipes(Rank(sender), Rank(receiver))
        if pipe.bytes_per_s == 20 * MBIT
    ]
    assert len(keys) == len(set(keys)) == 8, "an uplink and a downlink of each link"


def test_dynamic_sys_a_is_permuted_every_third_of_the_run() -> None:
    plan = load_environment("dynamic-sys-a").plan(workers(6), 8, duration_s=300)
    cores = [
        [round((worker.quota_cores or 0) / plan.core_scale) for worker in plan.at(time_s).workers]
        for time_s in (0, 99, 101, 201)
    ]
    assert cores == [
        [24, 24, 12, 12, 4, 4],
        [24, 24, 12, 12, 4, 4],
        [12, 12, 4, 4, 24, 24],
        [4, 4, 24, 24, 12, 12],
    ]
    assert plan.at(101).worker(Rank(0)).uplink[0].bytes_per_s == 35 * MBIT
    assert plan.initial.worker(Rank(0)).uplink[0].bytes_per_s == 50 * MBIT


def test_a_change_keeps_the_values_that_it_does_not_name() -> None:
    made = environment(
        workers=[{"count": 2, "cores": 1, "mbitPerS": 20}],
        changes=[
            {"at": {"seconds": 10}, "mbitPerS": [5, 5]},
            {"at": {"seconds": 20}, "cores": [1, 3]},
        ],
    )
    last = made.plan(workers(2), 8).at(20)
    assert made.plan(workers(2), 8).changes_links
    assert last.link_bytes_per_s(Rank(0), Rank(1)) == 5 * MBIT
    assert (last.worker(Rank(1)).quota_cores or 0) / (last.worker(Rank(0)).quota_cores or 1) == 3


def test_a_cut_site_is_cut_from_the_others_and_restored() -> None:
    made = environment(
        sites=[{"name": "a", "workers": 3}, {"name": "b", "workers": 1}],
        changes=[
            {"at": {"seconds": 1}, "cutSites": ["b"]},
            {"at": {"seconds": 2}, "cutSites": [], "cutWorkers": [0]},
        ],
    )
    plan = made.plan(workers(3, 1), 8)
    assert plan.changes_links
    cuts = [[set(w.cut_peers) for w in plan.at(time_s).workers] for time_s in (0, 1, 2)]
    assert cuts[0] == [set()] * 4
    assert cuts[1] == [{3}, {3}, {3}, {0, 1, 2}]
    assert cuts[2] == [{1, 2, 3}, {0}, {0}, {0}]
    assert plan.at(1).link_bytes_per_s(Rank(0), Rank(3)) == 0


def test_a_cut_link_is_cut_only_at_its_ends_and_restored() -> None:
    made = environment(
        sites=[
            {"name": "a", "workers": 2},
            {"name": "b", "workers": 1},
            {"name": "c", "workers": 1},
        ],
        changes=[
            {"at": {"seconds": 1}, "cutLinks": [{"sites": ["a", "b"]}, {"workers": [3, 2]}]},
            {"at": {"seconds": 2}, "cutLinks": []},
        ],
    )
    plan = made.plan(workers(2, 1, 1), 8)
    assert plan.changes_links
    cuts = [[set(w.cut_peers) for w in plan.at(time_s).workers] for time_s in (0, 1, 2)]
    assert cuts == [[set()] * 4, [{2}, {2}, {0, 1, 3}, {2}], [set()] * 4]


@pytest.mark.parametrize(
    ("counts", "path"), [((5,), "workers"), ((2, 2), "sites"), ((1, 3), "sites")]
)
def test_an_environment_that_contradicts_the_job_is_refused_naming_both(
    counts: tuple[int, ...], path: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_environment("two-clouds").plan(workers(*counts), 8, source="cifar10.yaml")
    assert path in [problem.path for problem in caught.value.problems]
    assert "two-clouds" in str(caught.value)
    assert "cifar10.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"permutation": [0, 1]}, "changes[0].permutation"),
        ({"cores": [1]}, "changes[0].cores"),
        ({"mbitPerS": [1, 2, 3]}, "changes[0].mbitPerS"),
        ({"cutWorkers": [9]}, "changes[0].cutWorkers"),
        ({"cutSites": ["nowhere"]}, "changes[0].cutSites"),
        ({"cutLinks": [{"workers": [0, 9]}]}, "changes[0].cutLinks[0].workers"),
        ({"cutLinks": [{"sites": ["nowhere", "neither"]}]}, "changes[0].cutLinks[0].sites"),
        ({"at": {"fraction": 0.5}}, "changes[0].at.fraction"),
    ],
)
def test_an_invalid_change_is_refused(change: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        environment(changes=[{"at": {"seconds": 1}, **change}]).plan(workers(4), 8)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_other_cores_change_no_link() -> None:
    made = environment(
        workers=[{"count": 2, "cores": 1, "mbitPerS": 20}],
        changes=[{"at": {"seconds": 10}, "cores": [1, 3]}],
    )
    assert not made.plan(workers(2), 8).changes_links


def test_changes_out_of_order_are_refused() -> None:
    with pytest.raises(SpecError, match="order of time"):
        environment(changes=[{"at": {"seconds": 2}}, {"at": {"seconds": 1}}])


def test_a_fraction_before_seconds_is_reported_with_all_compared_times() -> None:
    made = environment(
        changes=[{"at": {"seconds": 60}}, {"at": {"seconds": 90}}, {"at": {"fraction": 0.5}}]
    )
    with pytest.raises(SpecError) as caught:
        made.plan(workers(4), None, duration_s=10)
    (problem,) = caught.value.problems
    assert str(problem) == (
        "changes[2].at: changes must be in order of time, and changes[1].at is 90 s (given: 5 s, "
        "which is fraction 0.5 of 10 s); allowed: 90 s or later; or a run of 180 s or longer "
        "(trainer.stop.maxSeconds)"
    )
    with pytest.raises(SpecError):
        made.plan(workers(4), None, duration_s=179)
    made.plan(workers(4), None, duration_s=180)


def test_a_plan_without_an_environment_limits_nothing() -> None:
    plan = unlimited_plan(workers(2, 2))
    assert not plan.shapes_links
    assert not plan.changes_links
    assert not plan.limits_cpu
    assert plan.initial.link_bytes_per_s(Rank(0), Rank(3)) == float("inf")

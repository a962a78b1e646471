"""Tests of the resource controller in virtual time: its directives, their times and their reasons.

Batch shares follow hard quotas within 10 % in ten iterations, and again after the quotas are
permuted. If speeds were probed, they do so from the first iteration. All controllers agree on
shares that sum to the global batch. Each directive has a reason. The share of a lost worker is
spread, but not before the first step. Budgets follow deliveries; without a change there is no
directive. A restarted sidecar continues from the last directive, and one of a resumed worker from
the global batch of the checkpoint. Idle links are probed one at a time.

The amount of data is reported before any speed, and few more samples make no directive. Under a
heat budget, capacity and batch shrink to the mean share, and the directive has the present share.
Either side refuses an invalid share. An expected speed replaces the measured one until it ends,
with its reason.

Left out: sockets (tests/local).
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest

from dlion_api.errors import ContractError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    Capacity,
    CapacitySource,
    CpuAllowance,
    Directive,
    LinkDelivery,
    Peers,
    SpeedProbe,
    StepTiming,
)
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.sidecar_protocol import decode, encode
from dlion_api.spec import Job, load_job
from dlion_core.resource_control.batching import GlobalBatchController
from dlion_core.resource_control.resource_controller import (
    IDLE_LINK_S,
    PROBE_RETRY_S,
    ResourceController,
)
from quota_cpu import QuotaCpu

CPU_S_PER_SAMPLE = 0.01
GLOBAL = 192


def job_of(count: int, *, dataset: dict[str, object] | None = None, **batching: object) -> Job:
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "digits"},
            "spec": {
                "sites": [{"name": "plant", "groups": [{"name": "any", "workers": count}]}],
                "trainer": {
                    "image": "dlion",
                    "program": {"builtin": "cipher"},
                    "dataset": dataset or {"name": "digits"},
                    "stop": {"maxSteps": 10},
                },
                "batching": {
                    "policy": "weighted",
                    "globalBatchSize": {"initial": GLOBAL, "growth": False},
                }
                | batching,
                "exchange": {"policy": "dlion"},
                "network": {"bandwidthFraction": 1},  # then budgets are the rates of links
            },
        }
    )


def membership_of(job: Job, *, gone: tuple[int, ...] = ()) -> Membership:
    members = tuple(
        Member(
            worker,
            1,
            MemberState.LOST if worker.rank in gone else MemberState.READY,
            "10.0.0.1:1",
            "10.0.0.1:2",
        )
        for worker in job.workers()
    )
    return Membership(1 + len(gone), job.key, len(members), members)


class SynchronousJob:
    """Workers under quotas that wait for the slowest, each with its controller. A published
    capacity reaches all at once.
    """

    def __init__(self, quotas: list[float], *, exchange_cpu_s: float = 0.03) -> None:
        self.job = job_of(len(quotas))
        self.exchange_cpu_s = exchange_cpu_s
        self.cpus = [QuotaCpu(quota) for quota in quotas]
        self.controllers = [ResourceController(self.job, Rank(rank)) for rank in range(len(quotas))]
        self.iteration = 0
        for controller in self.controllers:
            controller.handle(Peers(membership_of(self.job), 50_000), 0.0)

    def batches(self) -> list[int]:
        return [d.directive.local_batch_size for d in self.controllers if d.directive is not None]

    def iterate(self) -> None:
        self.iteration += 1
        began_s = self.cpus[0].now_s
        own: list[tuple[float, float, float]] = []
        for cpu, samples in zip(self.cpus, self.batches(), strict=True):
            began_cpu_s = cpu.cpu_s
            cpu.burn(samples * CPU_S_PER_SAMPLE + self.exchange_cpu_s / 2)
            compute_s = cpu.now_s - began_s
            cpu.burn(self.exchange_cpu_s / 2)
            own.append((compute_s, cpu.now_s - began_s, cpu.cpu_s - began_cpu_s))
        end_s = max(cpu.now_s for cpu in self.cpus)
        batches = self.batches()
        for controller, cpu, (compute_s, own_s, cpu_s), samples in zip(
            self.controllers, self.cpus, own, batches, strict=True
        ):
            cpu.wait(end_s - cpu.now_s)
            controller.handle(CpuAllowance(cpu.quota_cores, cpu.cpu_s, cpu.throttled_s), end_s)
            controller.handle(
                StepTiming(
                    iteration=self.iteration,
                    samples=samples,
                    compute_s=compute_s,
                    wall_s=end_s - began_s,
                    cpu_s=cpu_s,
                    compute_cpu_s=samples * CPU_S_PER_SAMPLE,
                    waited_s=end_s - began_s - own_s,
                ),
                end_s,
            )
        self.share_capacities()

    def share_capacities(self) -> None:
        for sender in self.controllers:
            for receiver in self.controllers:
                if receiver is not sender:
                    receiver.handle_capacity(sender.capacities.own(), 1)


def assert_shares(batches: list[int], quotas: list[float]) -> None:
    for batch, quota in zip(batches, quotas, strict=True):
        assert batch / sum(batches) == pytest.approx(quota / sum(quotas), rel=0.1)


@pytest.mark.parametrize("exchange_cpu_s", [0.0, 0.03])
def test_shares_follow_hard_quotas_within_ten_iterations_and_again_when_permuted(
    exchange_cpu_s: float,
) -> None:
    quotas = [0.8, 0.4, 0.2, 0.2]
    run = SynchronousJob(quotas, exchange_cpu_s=exchange_cpu_s)
    assert run.batches() == [48, 48, 48, 48]
    for _ in range(10):
        run.iterate()
    assert_shares(run.batches(), quotas)
    permuted = [0.2, 0.2, 0.8, 0.4]
    for cpu, quota in zip(run.cpus, permuted, strict=True):
        cpu.quota_cores = quota
    for _ in range(10):
        run.iterate()
    assert_shares(run.batches(), permuted)


@pytest.mark.parametrize("quotas", [[0.8, 0.4, 0.2, 0.2], [0.3, 0.3, 0.3, 0.3]])
def test_probes_give_the_shares_of_the_first_iteration(quotas: list[float]) -> None:
    """There is a directive with the capacity of all workers also if no share changes."""
    run = SynchronousJob(quotas)
    for controller, quota in zip(run.controllers, quotas, strict=True):
        speed = SpeedProbe(
            round(quota / CPU_S_PER_SAMPLE), 1.0, quota, 1.0 - quota, quota, largest_batch=20
        )
        controller.handle(speed, 1.0)
    run.share_capacities()
    assert_shares(run.batches(), quotas)
    for controller in run.controllers:
        assert controller.directive is not None
        assert len(controller.directive.capacities) == len(quotas)
        assert controller.steps_total == 0


def test_all_workers_agree_on_shares_that_sum_to_the_global_batch() -> None:
    run = SynchronousJob([0.8, 0.4, 0.2, 0.2])
    for _ in range(20):
        run.iterate()
        assert sum(run.batches()) == GLOBAL


def test_a_changed_capacity_is_named_in_the_reason() -> None:
    controller = ResourceController(job_of(2), Rank(0))
    controller.handle(Peers(membership_of(job_of(2)), 1000), 0.0)
    controller.handle_capacity(Capacity(Rank(1), 310.0, 2.0, CapacitySource.RATE, 5), 1)
    for iteration in range(1, 4):
        controller.handle(StepTiming(iteration, 62, 1.0, 1.0, 1.0), float(iteration))
    directive = controller.handle_capacity(Capacity(Rank(1), 150.0, 2.0, CapacitySource.RATE, 9), 1)
    assert directive is not None
    assert "capacity of 1 fell from 310 to 150 samples/s" in directive.reason


def test_versions_increase_and_noise_makes_no_directive() -> None:
    controller = ResourceController(job_of(2), Rank(0))
    first = controller.handle(Peers(membership_of(job_of(2)), 1000), 0.0)
    assert first is not None
    second = controller.handle_capacity(Capacity(Rank(1), 100.0, 2.0, CapacitySource.RATE, 1), 1)
    assert second is None, "still an even share: the only known capacity counts for all"
    directives = [
        controller.handle(StepTiming(i, 100, 2.0 + 0.01 * (i % 2), 2.0, 2.0), 2.0 * i)
        for i in range(1, 20)
    ]
    versions = [directive.version for directive in directives if directive is not None]
    assert versions == sorted(set(versions))
    assert len(versions) == 1, "one change: 50 against 100 samples/s"


def test_controllers_agree_on_the_batch_when_one_worker_gets_data() -> None:
    """Each controller assumes for all workers the amount of data of its own worker."""
    growing = {"globalBatchSize": {"initial": 100, "everySteps": 10, "max": 10_000}}
    job = job_of(2, **growing)
    controllers = [ResourceController(job, Rank(0)), ResourceController(job, Rank(1))]

    def train(iterations: range) -> list[int]:
        for iteration in iterations:
            for controller in controllers:
                controller.handle(StepTiming(iteration, 50, 1.0, 1.0, 1.0), float(iteration))
            for own, other in (controllers, reversed(controllers)):
                own.handle_capacity(other.capacities.own(), 1)
        return [d.directive.global_batch_size for d in controllers if d.directive is not None]

    for controller in controllers:
        controller.handle(Peers(membership_of(job), 2000), 0.0)
    assert train(range(1, 60)) == [200, 200]
    controllers[1].handle(Peers(membership_of(job), 6000), 60.0)
    assert train(range(60, 120)) == [400, 400]


def test_the_training_set_is_the_sum_of_all_workers_once_all_have_reported() -> None:
    """It is not this worker's amount times the number of workers. A worker lost meanwhile still
    counts.
    """
    job = job_of(2)
    sizes = [100, 10_000]
    controllers = [ResourceController(job, Rank(0)), ResourceController(job, Rank(1))]

    def train(controller: ResourceController, iteration: int) -> int:
        controller.handle(StepTiming(iteration, 50, 1.0, 1.0, 1.0), float(iteration))
        assert controller.directive is not None
        return controller.directive.training_set_samples

    alone = replace(membership_of(job), members=membership_of(job).members[:1])
    for controller, size in zip(controllers, sizes, strict=True):
        controller.handle(Peers(alone, 2 * size, size), 0.0)
        assert controller.directive is not None
        assert controller.directive.training_set_samples == 0
        controller.handle(Peers(membership_of(job), 2 * size, size), 0.1)
        assert [train(controller, iteration) for iteration in range(1, 5)] == [0] * 4
    for own, other in (controllers, reversed(controllers)):
        own.handle_capacity(other.capacities.own(), 1)
        assert own.directive is not None
        assert own.directive.training_set_samples == 10_100
    assert "the training set has 10100 samples" in controllers[0].directive.reason
    controllers[0].handle(Peers(membership_of(job, gone=(1,)), 200, 100), 2.0)
    assert train(controllers[0], 5) == 10_100
    again = ResourceController(job, Rank(0))
    again.handle(controllers[0].directive, 3.0)
    again.handle(Peers(membership_of(job), 200, 100), 3.0)
    assert train(again, 6) == 10_100


def test_a_new_sidecar_receives_and_sends_the_amount_of_data_before_any_speed() -> None:
    """For example, that of a worker in another pod that has adopted a peer's state,
    before a step.
    """
    job = job_of(2)
    trains, restarted = ResourceController(job, Rank(0)), ResourceController(job, Rank(1))
    trains.handle(Peers(membership_of(job), 2000, 1000), 0.0)
    trains.handle(StepTiming(1, 50, 1.0, 1.0, 1.0), 1.0)
    assert trains.directive is not None
    assert trains.directive.training_set_samples == 0
    restarted.handle(Peers(membership_of(job), 48, 24), 0.0)
    trains.handle_capacity(restarted.own(), 1)
    restarted.handle_capacity(trains.own(), 1)
    for controller in (trains, restarted):
        assert controller.directive is not None
        assert controller.directive.training_set_samples == 1024
        assert not controller.capacities.known([Rank(0), Rank(1)])
    trains.handle_capacity(Capacity(Rank(1), 0.0, 0.0, CapacitySource.UNKNOWN, 0, 48, 72), 2)
    trains.handle_capacity(Capacity(Rank(1), 9.0, 1.0, CapacitySource.RATE, 4, 0, 96), 2)
    trains.handle_capacity(Capacity(Rank(1), 0.0, 0.0, CapacitySource.UNKNOWN, 0, 0, 500), 1)
    assert trains.directive.training_set_samples == 1096, "an older incarnation changes nothing"


def test_a_worker_lost_before_the_sidecar_started_counts_with_the_mean_of_others() -> None:
    job = job_of(3)
    controller = ResourceController(job, Rank(1))
    controller.handle(Peers(membership_of(job, gone=(2,)), 72, 24), 0.0)
    controller.handle_capacity(Capacity(Rank(0), 50.0, 2.0, CapacitySource.RATE, 9, 0, 1000), 1)
    assert controller.directive is not None
    assert controller.directive.training_set_samples == 1536
    controller.handle_capacity(Capacity(Rank(2), 50.0, 2.0, CapacitySource.RATE, 9, 0, 100), 1)
    controller.handle(Peers(membership_of(job), 72, 24), 1.0)
    assert controller.directive.training_set_samples == 1124


def test_a_few_more_files_make_no_directive() -> None:
    job = job_of(2, dataset=WATCHED)
    controller = ResourceController(job, Rank(0))
    controller.handle_capacity(Capacity(Rank(1), 50.0, 2.0, CapacitySource.RATE, 1, 0, 200_000), 1)
    directives = [
        controller.handle(Peers(membership_of(job), 2 * samples, samples), 0.0)
        for samples in range(200_000, 206_000, 100)
    ]
    known = [one.training_set_samples for one in directives if one is not None]
    assert known == [400_000, 404_100]
    assert controller.directive is not None
    assert "the training set has 404100 samples" in controller.directive.reason


WATCHED: dict[str, object] = {
    "path": "cameras/{rank}", "format": "images", "evaluationPath": "held-out", "watch": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("dataset", "batching", "after"),
    [
        (None, {}, [100, 100]),
        (None, {"dataFraction": 0.5}, [75, 125]),
        (WATCHED, {}, [75, 125]),
        (WATCHED, {"dataFraction": 0.0}, [100, 100]),
        (WATCHED, {"dataFraction": 1.0}, [50, 150]),
        (WATCHED, {"policy": "even"}, [100, 100]),
    ],
)
def test_late_data_raise_the_share_of_their_worker(
    dataset: dict[str, object] | None, batching: dict[str, object], after: list[int]
) -> None:
    sizes = {"globalBatchSize": {"initial": 200, "growth": False}}
    job = job_of(2, dataset=dataset, **sizes, **batching)
    controllers = [ResourceController(job, Rank(0)), ResourceController(job, Rank(1))]

    def train(iterations: range) -> list[int]:
        for iteration in iterations:
            for controller in controllers:
                controller.handle(StepTiming(iteration, 50, 1.0, 1.0, 1.0), float(iteration))
            for own, other in (controllers, reversed(controllers)):
                own.handle_capacity(other.capacities.own(), 1)
        return [d.directive.local_batch_size for d in controllers if d.directive is not None]

    for controller in controllers:
        controller.handle(Peers(membership_of(job), 2000, 1000), 0.0)
    assert train(range(1, 20)) == [100, 100]
    controllers[1].handle(Peers(membership_of(job), 6000, 3000), 20.0)
    assert train(range(20, 40)) == after


def test_an_even_policy_ignores_capacities() -> None:
    controller = ResourceController(job_of(2, policy="even"), Rank(0))
    controller.handle(Peers(membership_of(job_of(2)), 1000), 0.0)
    controller.handle_capacity(Capacity(Rank(1), 1000.0, 2.0, CapacitySource.RATE, 1), 1)
    for iteration in range(1, 4):
        controller.handle(StepTiming(iteration, 10, 1.0, 1.0, 1.0), float(iteration))
    assert controller.directive is not None
    assert controller.directive.local_batch_size == GLOBAL // 2


def test_a_lost_workers_share_is_spread() -> None:
    job = job_of(4)
    controller = ResourceController(job, Rank(0))
    controller.handle(Peers(membership_of(job), 1000), 0.0)
    controller.handle(StepTiming(1, 48, 0.1, 0.1, 0.1), 1.0)
    directive = controller.handle(Peers(membership_of(job, gone=(3,)), 1000), 2.0)
    assert directive is not None
    assert directive.local_batch_size == GLOBAL // 3


def test_before_the_first_step_workers_that_may_still_join_keep_their_share() -> None:
    job = job_of(4)
    controller = ResourceController(job, Rank(0))
    alone = replace(membership_of(job), members=membership_of(job).members[:1])
    directive = controller.handle(Peers(alone, 1000), 0.0)
    assert directive is not None
    assert directive.local_batch_size == GLOBAL // 4


def test_the_first_batch_after_a_suspension_does_not_depend_on_who_returns_first() -> None:
    """All are lost for the coordinator until they return. A worker that has left the manifest does
    not return; one that came later than the manifest does.
    """
    job = job_of(2, policy="even")
    later, former = (replace(job.workers()[0], rank=Rank(rank), index=rank) for rank in (2, 3))
    members = (
        *membership_of(job, gone=(0, 1)).members,
        Member(later, 1, MemberState.LOST, ""),
        Member(former, 1, MemberState.FINISHED, ""),
    )
    before = replace(membership_of(job), members=members)
    for order in itertools.permutations(range(3)):
        controller, membership = ResourceController(job, Rank(order[0])), before
        for rank in order:
            back = replace(members[rank], state=MemberState.READY)
            known = [back if m.identity.rank == rank else m for m in membership.members]
            membership = replace(membership, members=tuple(known))
            controller.handle(Peers(membership, 1000), 0.0)
            assert controller.directive is not None
            assert controller.directive.local_batch_size == GLOBAL // 3, order
        controller.handle(StepTiming(11, 64, 1.0, 1.0, 1.0), 1.0)
        assert controller.directive is not None
        assert controller.directive.local_batch_size == GLOBAL // 3


def test_the_global_batch_grows_with_the_iterations() -> None:
    growing = {"globalBatchSize": {"initial": 64, "everySteps": 10, "max": 5000}}
    job = job_of(2, **growing)
    controller = ResourceController(job, Rank(0))
    controller.handle(Peers(membership_of(job), 50_000), 0.0)
    directive = None
    for iteration in range(1, 10):
        directive = controller.handle(StepTiming(iteration, 32, 0.1, 0.1, 0.1), iteration / 10)
    assert directive is not None
    assert directive.global_batch_size == 128
    assert "global batch rose from 64 to 128 samples" in directive.reason


def deliver(controller: ResourceController, iteration: int, busy_s: float) -> Directive | None:
    controller.handle(LinkDelivery(Rank(1), 400_000, 400_000, busy_s, 0), float(iteration))
    return controller.handle(
        StepTiming(iteration, 96, 0.4, 0.4, 0.4, waited_s=0.0), float(iteration)
    )


def test_budgets_follow_deliveries_with_the_reason() -> None:
    controller = ResourceController(job_of(2), Rank(0))
    controller.handle(Peers(membership_of(job_of(2)), 1000), 0.0)
    first = deliver(controller, 1, 0.2)
    assert first is not None
    assert first.budget_bytes == {Rank(1): 800_000}
    deliver(controller, 2, 0.2)
    dropped = deliver(controller, 3, 0.8)
    assert dropped is not None
    assert dropped.budget_bytes == {Rank(1): 200_000}
    assert "rate of the link to 1 fell from 2 to 0.5 MB/s" in dropped.reason


def budget_after_a_step(job: Job, *, wall_s: float) -> int:
    """Budget in bytes of a link of 2 MB/s, after a step with 0.4 s for the gradient and no wait."""
    controller = ResourceController(job, Rank(0))
    controller.handle(Peers(membership_of(job), 1000), 0.0)
    controller.handle(LinkDelivery(Rank(1), 400_000, 400_000, 0.2, 0), 1.0)
    directive = controller.handle(StepTiming(1, 96, 0.4, wall_s, 0.4, waited_s=0.0), 1.0)
    assert directive is not None
    return directive.budget_bytes[Rank(1)]


def test_a_slow_exchange_does_not_raise_the_budget() -> None:
    assert budget_after_a_step(job_of(2), wall_s=0.5) == 1_000_000
    assert budget_after_a_step(job_of(2), wall_s=4.0) == 1_600_000


def test_budgets_are_cut_to_the_bandwidth_fraction_of_the_manifest() -> None:
    job = job_of(2)
    network = replace(job.spec.network, bandwidth_fraction=0.25)
    job = replace(job, spec=replace(job.spec, network=network))
    assert budget_after_a_step(job, wall_s=0.4) == 200_000


@pytest.mark.parametrize(
    ("policy", "part", "bytes_sent"),
    [("dlion", 0.2, 320_000), ("dlion", 100, 800_000), ("topk", 0.2, 800_000)],
)
def test_budgets_of_dlion_stay_within_a_part_of_the_gradients_cpu(
    policy: str, part: float, bytes_sent: int
) -> None:
    """0.32 s of computing, 0.08 s for 800 kB sent and received: 100 ns a byte."""
    job = job_of(2)
    exchange = replace(job.spec.exchange, policy=policy, cpu_fraction=part)
    job = replace(job, spec=replace(job.spec, exchange=exchange))
    controller = ResourceController(job, Rank(0))
    controller.handle(Peers(membership_of(job), 1000), 0.0)
    controller.handle(LinkDelivery(Rank(1), 400_000, 400_000, 0.2, 0), 1.0)
    timing = StepTiming(
        1, 96, 0.4, 0.4, 0.4, compute_cpu_s=0.32, waited_s=0.0, exchanged_bytes=800_000
    )
    directive = controller.handle(timing, 1.0)
    assert directive is not None
    assert directive.budget_bytes == {Rank(1): bytes_sent}


def test_a_restarted_sidecar_continues_from_the_last_directive() -> None:
    job = job_of(2)
    controller = ResourceController(job, Rank(0))
    last = Directive(
        version=41,
        local_batch_size=160,
        global_batch_size=GLOBAL,
        budget_bytes={Rank(1): 500_000},
        capacities={Rank(0): 100.0, Rank(1): 20.0},
        bandwidth_bytes_per_s={Rank(1): 500_000.0},
    )
    controller.handle(last, 0.0)
    change = controller.handle(Peers(membership_of(job), 1000), 0.0)
    directive = change or controller.directive
    assert directive is not None
    assert directive.version >= 41
    assert directive.local_batch_size == 160
    assert directive.budget_bytes[Rank(1)] > 0


def test_a_restarted_sidecar_knows_that_lost_workers_have_no_share() -> None:
    """The run has begun: the trainer has a directive."""
    controller = ResourceController(job_of(3, policy="even"), Rank(0))
    controller.handle(Directive(41, GLOBAL // 2, GLOBAL), 0.0)
    controller.handle(Peers(membership_of(job_of(3), gone=(2,)), 1000), 0.0)
    assert controller.directive is not None
    assert controller.directive.local_batch_size == GLOBAL // 2


def test_a_worker_that_returns_to_a_run_knows_that_lost_workers_have_no_share() -> None:
    controller = ResourceController(job_of(3, policy="even"), Rank(0))
    controller.handle(Peers(membership_of(job_of(3), gone=(2,)), 1000), 0.0)
    assert controller.directive is not None
    assert controller.directive.local_batch_size == GLOBAL // 3, "all may have returned"
    controller.handle_capacity(Capacity(Rank(1), 50.0, 2.0, CapacitySource.RATE, 500), 1)
    assert controller.directive.local_batch_size == GLOBAL // 2


@pytest.mark.parametrize(
    ("state", "incarnation", "counts"),
    [
        (MemberState.READY, 6, False),
        (MemberState.LOST, 7, False),
        (MemberState.FINISHED, 7, False),
        (MemberState.READY, 7, True),
        (MemberState.READY, 8, True),
    ],
    ids=["of an earlier start", "lost", "finished", "ready", "newer than the membership"],
)
@pytest.mark.parametrize("is_early", [False, True], ids=["in order", "before the membership"])
def test_only_a_ready_peer_in_its_present_start_shows_that_the_run_has_begun(
    state: MemberState, incarnation: int, counts: bool, is_early: bool
) -> None:
    """Worker 2 of a suspended run has not joined again, and is about to."""
    job = job_of(3, policy="even")
    before = membership_of(job, gone=(2,))
    peer = replace(before.members[1], incarnation=7, state=state)
    peers = Peers(replace(before, members=(before.members[0], peer, before.members[2])), 1000)
    controller = ResourceController(job, Rank(0))
    for is_report in (is_early, not is_early):
        if is_report:
            report = Capacity(Rank(1), 50.0, 2.0, CapacitySource.RATE, 500)
            controller.handle_capacity(report, incarnation)
        else:
            controller.handle(peers, 0.0)
    assert controller.directive is not None
    workers = 3 - (state is MemberState.FINISHED)
    assert controller.directive.local_batch_size == GLOBAL // (2 if counts else workers)


def test_shares_sum_to_the_global_batch_while_a_linked_worker_has_lost_its_coordinator() -> None:
    """It keeps its membership, in which all are ready. Once its link is down it has ended."""
    job = job_of(3, policy="even")
    controllers = [ResourceController(job, Rank(rank)) for rank in range(3)]

    def share(rank: int, peers: Peers) -> int:
        controllers[rank].handle(peers, 1.0)
        directive = controllers[rank].directive
        assert directive is not None
        return directive.local_batch_size

    before = Peers(membership_of(job), 1000)
    for rank, controller in enumerate(controllers):
        share(rank, before)
        controller.handle(StepTiming(1, GLOBAL // 3, 1.0, 1.0, 1.0), 1.0)
    lost = Peers(membership_of(job, gone=(1,)), 1000, linked_lost=(Rank(1),))
    assert [share(0, lost), share(1, before), share(2, lost)] == [GLOBAL // 3] * 3
    assert [m.identity.rank for m in controllers[0].neighbours()] == [1, 2], "it keeps its budget"
    ended = replace(lost, linked_lost=())
    assert [share(0, ended), share(2, ended)] == [GLOBAL // 2] * 2


def test_a_finished_worker_has_no_share_although_it_is_linked() -> None:
    job = job_of(2, policy="even")
    members = membership_of(job)
    finished = replace(members.members[1], state=MemberState.FINISHED)
    controller = ResourceController(job, Rank(0))
    membership = replace(members, members=(members.members[0], finished))
    controller.handle(Peers(membership, 1000, linked_lost=(Rank(1),)), 0.0)
    assert controller.directive is not None
    assert controller.directive.local_batch_size == GLOBAL


def test_an_old_report_does_not_hide_that_of_the_present_start() -> None:
    job = job_of(3, policy="even")
    controller = ResourceController(job, Rank(0))
    for incarnation in (1, 0):
        report = Capacity(Rank(1), 50.0, 2.0, CapacitySource.RATE, 500)
        controller.handle_capacity(report, incarnation)
    controller.handle(Peers(membership_of(job, gone=(2,)), 1000), 0.0)
    assert controller.directive is not None
    assert controller.directive.local_batch_size == GLOBAL // 2


def test_a_restarted_sidecar_keeps_the_global_batch_although_data_have_been_added() -> None:
    growing = {"globalBatchSize": {"initial": 64, "everySteps": 10, "max": 50_000}}
    job = job_of(2, **growing)

    def batch_at(controller: ResourceController, iteration: int) -> int:
        controller.handle(StepTiming(iteration, 32, 0.1, 0.1, 0.1), iteration / 10)
        assert controller.directive is not None
        return controller.directive.global_batch_size

    controller, again = ResourceController(job, Rank(0)), ResourceController(job, Rank(0))
    controller.handle(Peers(membership_of(job), 5000), 0.0)
    before = [batch_at(controller, iteration) for iteration in range(1, 75)][-1]
    controller.handle(Peers(membership_of(job), 50_000), 7.4)
    assert controller.directive is not None
    again.handle(controller.directive, 7.5)
    again.handle(Peers(membership_of(job), 50_000), 7.5)
    assert again.directive is not None
    assert again.directive.global_batch_size == before
    for iteration in range(76, 120):
        assert batch_at(again, iteration) == batch_at(controller, iteration)


GROWING = {"initial": 64, "everySteps": 10, "max": 50_000, "growth": True}


def first_batch(controller: ResourceController, *positions: tuple[int, int]) -> int:
    """The global batch of the next directive, after positions: iteration and global batch."""
    members = membership_of(job_of(2))
    for iteration, size in positions:
        peers = Peers(members, 50_000, iteration=iteration, global_batch_size=size)
        controller.handle(peers, 0.0)
    assert controller.directive is not None
    return controller.directive.global_batch_size


@pytest.mark.parametrize("iteration", [1, 95, 99, 100], ids=str)
def test_the_first_batch_after_a_resume_is_that_of_a_run_without_a_break(iteration: int) -> None:
    job = job_of(2, globalBatchSize=GROWING)
    whole = GlobalBatchController(job.spec.global_batch_size)
    saved = whole.at(iteration, 50_000)
    controller = ResourceController(job, Rank(0))
    resumed = [first_batch(controller, (iteration, saved))]
    assert controller.own().iteration == 0, "no step of this run has been made yet"
    for following in range(iteration + 1, 130):
        step = StepTiming(following, 32, 1.0, 1.0, 1.0)
        controller.handle(step, float(following))
        assert controller.directive is not None
        resumed.append(controller.directive.global_batch_size)
    assert resumed == [whole.at(each, 50_000) for each in range(iteration + 1, 131)]


def test_a_resumed_worker_that_adopts_a_peers_state_follows_with_its_batch() -> None:
    """The batch that it held is of an earlier iteration. Meanwhile data may have been added."""
    job = job_of(2, globalBatchSize=GROWING)
    whole = GlobalBatchController(job.spec.global_batch_size)
    saved = whole.at(35, 20_000)
    assert first_batch(ResourceController(job, Rank(0)), (35, saved), (95, 0)) == whole.at(
        96, 50_000
    )


def test_steps_and_directives_are_newer_than_a_position() -> None:
    job = job_of(2, globalBatchSize=GROWING)
    stepped, restarted = ResourceController(job, Rank(0)), ResourceController(job, Rank(0))
    stepped.handle(Peers(membership_of(job), 50_000), 0.0)
    stepped.handle(StepTiming(25, 32, 1.0, 1.0, 1.0), 1.0)
    restarted.handle(Directive(7, 96, 192), 0.0)
    assert [first_batch(each, (24, 500)) for each in (stepped, restarted)] == [192, 192]


@pytest.mark.parametrize(("size", "first"), [(1, 64), (10**9, 50_000)])
def test_a_resumed_batch_is_within_the_manifests_bounds(size: int, first: int) -> None:
    controller = ResourceController(job_of(2, globalBatchSize=GROWING), Rank(0))
    assert first_batch(controller, (95, size)) == first


def test_older_capacities_and_directives_are_ignored() -> None:
    controller = ResourceController(job_of(2), Rank(0))
    controller.handle_capacity(Capacity(Rank(1), 100.0, 2.0, CapacitySource.RATE, 9), 2)
    controller.handle_capacity(Capacity(Rank(1), 50.0, 2.0, CapacitySource.RATE, 8), 2)
    controller.handle_capacity(Capacity(Rank(1), 40.0, 2.0, CapacitySource.RATE, 10), 1)
    assert controller.capacities.known([Rank(1)]) == {Rank(1): 100.0}
    controller.handle_capacity(Capacity(Rank(1), 60.0, 2.0, CapacitySource.RATE, 1), 3)
    assert controller.capacities.known([Rank(1)]) == {Rank(1): 60.0}


def test_idle_links_are_probed_one_at_a_time_with_pauses() -> None:
    job = job_of(3)
    controller = ResourceController(job, Rank(0))
    controller.handle(Peers(membership_of(job), 1000), 0.0)
    first, second = controller.link_to_probe(0.0), controller.link_to_probe(0.0)
    assert first is not None
    assert second is not None
    assert (first.identity.rank, second.identity.rank) == (1, 2)
    assert controller.link_to_probe(0.0) is None
    controller.probed(Rank(1), 100_000, 0.1, 0.0)
    again = controller.link_to_probe(PROBE_RETRY_S)
    assert again is not None
    assert again.identity.rank == 2, "its probe failed"
    later = controller.link_to_probe(IDLE_LINK_S)
    assert later is not None
    assert later.identity.rank == 1


def test_a_worker_added_to_a_group_gets_its_share() -> None:
    """The run began without it. It knows itself and another worker that joined later."""
    job = job_of(2).with_group_ranks()
    grown = job_of(4).with_group_ranks()
    controllers = [ResourceController(job, worker.rank) for worker in grown.workers()]
    for controller in controllers[:2]:
        controller.handle(Peers(membership_of(job), 50_000), 0.0)
        controller.handle(StepTiming(1, 96, 1.0, 1.0, 1.0), 1.0)
    directives = [
        controller.handle(Peers(membership_of(grown), 50_000), 2.0) for controller in controllers
    ]
    assert [directive and directive.local_batch_size for directive in directives] == [
        GLOBAL // 4
    ] * 4
    assert [len(controller.neighbours()) for controller in controllers] == [3] * 4


# ---- the heat budget -----------------------------------------------------------------------------

INVALID = [0.0, -0.1, 1.01, math.nan, math.inf]


def alone() -> ResourceController:
    """One of two workers, which knows only its own speed."""
    controller = SynchronousJob([1.0, 1.0]).controllers[0]
    controller.handle(SpeedProbe(100, 1.0, 1.0, 0.0, None, 100), 0.0)
    return controller


def test_capacity_follows_the_mean_share_and_the_directive_the_present_share() -> None:
    controller = alone()
    before = controller.own().samples_per_s
    directive = controller.set_compute_share(0.5, 0.8, 10.0)
    assert controller.own().samples_per_s == pytest.approx(0.8 * before)
    assert directive is not None
    assert directive.compute_share == 0.5
    assert "the heat budget fell from 100% to 50% of compute" in directive.reason


def test_a_limited_worker_has_a_smaller_part_of_the_batch() -> None:
    job = SynchronousJob([1.0, 1.0])
    for controller in job.controllers:
        controller.handle(SpeedProbe(100, 1.0, 1.0, 0.0, None, 100), 0.0)
    job.controllers[0].set_compute_share(0.5, 0.5, 10.0)
    for receiver, sender in ((0, 1), (1, 0)):
        job.controllers[receiver].handle_capacity(job.controllers[sender].own(), 1)
    hot, cool = job.batches()
    assert hot + cool == 192
    assert hot == pytest.approx(192 / 3, abs=2)


def test_a_small_change_makes_no_directive_but_the_end_of_the_limit_does() -> None:
    controller = alone()
    controller.set_compute_share(0.985, 0.985, 10.0)
    assert controller.set_compute_share(0.97, 0.985, 12.0) is None
    directive = controller.set_compute_share(1.0, 0.985, 14.0)
    assert directive is not None
    assert directive.compute_share == 1.0


def test_a_restarted_sidecar_continues_from_the_share_of_its_trainer() -> None:
    restarted = ResourceController(job_of(2), Rank(0))
    restarted.handle(Directive(7, 48, 192, compute_share=0.4), 0.0)
    restarted.handle(SpeedProbe(100, 1.0, 1.0, 0.0, None, 100), 0.0)
    assert restarted.own().samples_per_s == pytest.approx(40.0)


@pytest.mark.parametrize("share", INVALID)
def test_an_invalid_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="allowed: above 0, at most 1"):
        alone().set_compute_share(share, 0.5, 0.0)
    with pytest.raises(ValueError, match="allowed: above 0, at most 1"):
        alone().set_compute_share(0.5, share, 0.0)


@pytest.mark.parametrize("share", [0, 1.01, 2**60])
def test_a_trainer_refuses_an_invalid_share_in_a_message(share: float) -> None:
    fields = json.loads(encode(Directive(1, 48, 192)))
    fields["compute_share"] = share
    with pytest.raises(ContractError, match="compute share"):
        decode(json.dumps(fields).encode())


# ---- the expected speed --------------------------------------------------------------------------


def measured_pair() -> SynchronousJob:
    """Two equal workers that know each other's speed."""
    job = SynchronousJob([1.0, 1.0])
    for controller in job.controllers:
        controller.handle(SpeedProbe(100, 1.0, 1.0, 0.0, None, 100), 0.0)
    exchange_capacities(job)
    return job


def exchange_capacities(job: SynchronousJob) -> None:
    for receiver, sender in ((0, 1), (1, 0)):
        job.controllers[receiver].handle_capacity(job.controllers[sender].own(), 1)


def test_an_expected_speed_replaces_the_measured_one_until_it_ends() -> None:
    controller = measured_pair().controllers[0]
    measured = controller.measured_samples_per_s()
    assert measured == pytest.approx(100.0)
    directive = controller.set_expected_speed(50.0, "other work is expected", 10.0)
    assert controller.own().samples_per_s == 50.0
    assert controller.measured_samples_per_s() == measured
    assert directive is not None
    reason = "capacity of 0 fell from 100 to 50 samples/s; other work is expected"
    assert directive.reason == reason
    ended = controller.set_expected_speed(None, "", 20.0)
    assert controller.own().samples_per_s == measured
    assert ended is not None
    assert ended.reason == "capacity of 0 rose from 50 to 100 samples/s"


def test_an_expected_speed_ends_with_its_trainer() -> None:
    controller = measured_pair().controllers[0]
    controller.set_expected_speed(50.0, "other work is expected", 10.0)
    controller.trainer_started()
    controller.handle(SpeedProbe(100, 1.0, 1.0, 0.0, None, 100), 60.0)
    assert controller.own().samples_per_s == controller.measured_samples_per_s()


def test_a_worker_that_is_expected_to_be_slow_has_a_smaller_part_of_the_batch() -> None:
    job = measured_pair()
    job.controllers[0].set_expected_speed(50.0, "soon", 10.0)
    exchange_capacities(job)
    slow, fast = job.batches()
    assert slow + fast == GLOBAL
    assert slow == pytest.approx(GLOBAL / 3, abs=2)


def test_an_unmeasured_worker_has_no_expected_speed() -> None:
    controller = SynchronousJob([1.0, 1.0]).controllers[0]
    assert controller.measured_samples_per_s() is None
    controller.set_expected_speed(50.0, "soon", 10.0)
    assert controller.own().samples_per_s == 0.0


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="allowed: positive, finite"):
        alone().set_expected_speed(speed, "soon", 0.0)

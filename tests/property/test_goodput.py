"""Batching policy `goodput`: its estimator, its choice, and agreement of its directors.

The estimator finds the gradient and the noise of planted Gaussian gradients without bias, with
unequal batches, from each worker and from all. Over all workers it is the estimator of the analysis
of variance. The choice is that of brute force. Without noise the initial batch stays, where
iterations are quickest; with much noise it grows to the maximum. It changes only when due, also
after a sidecar's restart.

If the choice is clear, all directors make it and shares sum to it. Otherwise they choose one size
or two adjacent ones. A job that does not send whole gradients is refused.

Left out: learning (docs/exchange.md).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlion_api.errors import SpecError
from dlion_api.names import Rank
from dlion_api.protocol.measurements import (
    BatchChoice,
    Capacity,
    CapacitySource,
    Directive,
    GradientNoise,
    GradientNorms,
    Peers,
    StepTiming,
)
from dlion_api.protocol.membership import Member, Membership, MemberState
from dlion_api.protocol.sidecar_protocol import decode, encode
from dlion_api.spec import GlobalBatchSize, Job, load_job
from dlion_core.lifecycle.instruction_executor import NormMeter, squared_norm
from dlion_core.resource_control.goodput import (
    GoodputController,
    NoiseEstimator,
    best_batch,
    candidates,
    noise_scale,
)
from dlion_core.resource_control.resource_controller import ResourceController
from example_counts import examples

DIMENSIONS = 40
BATCHES = [2, 6, 32]
GRADIENT_SQUARE, VARIANCE = 2.0, 120.0


def planted(rng: np.random.Generator, gradient_D: NDArray[np.float64]) -> list[GradientNorms]:
    """One iteration's norms: gradients of workers with unequal batches, and their mean."""
    noise = math.sqrt(VARIANCE / DIMENSIONS)
    own = [gradient_D + rng.normal(0, noise / math.sqrt(b), DIMENSIONS) for b in BATCHES]
    mean_D = np.average(own, axis=0, weights=BATCHES)
    mean_square = float(mean_D @ mean_D)
    return [
        GradientNorms(float(own_D @ own_D), b, mean_square, sum(BATCHES))
        for own_D, b in zip(own, BATCHES, strict=True)
    ]


def estimates(runs: int, steps: int, seed: int) -> NDArray[np.float64]:
    """Square, variance and weight by run and worker."""
    rng = np.random.default_rng(seed)
    gradient_D = np.full(DIMENSIONS, math.sqrt(GRADIENT_SQUARE / DIMENSIONS))
    found = np.empty((runs, len(BATCHES), 3))
    for run in range(runs):
        estimators = [NoiseEstimator() for _ in BATCHES]
        for _ in range(steps):
            for estimator, norms in zip(estimators, planted(rng, gradient_D), strict=True):
                estimator.add(norms)
        for worker, estimator in enumerate(estimators):
            one = estimator.estimate()
            assert one is not None
            found[run, worker] = one.square, one.variance, one.weight
    return found


def test_each_worker_finds_the_planted_gradient_and_noise_without_bias() -> None:
    found = estimates(runs=400, steps=12, seed=7)
    for worker in range(len(BATCHES)):
        for column, truth in ((0, GRADIENT_SQUARE), (1, VARIANCE)):
            values = found[:, worker, column]
            error = values.std() / math.sqrt(len(values))
            assert error < 0.06 * truth, "too few draws"
            assert abs(values.mean() - truth) < 4 * error, (worker, column)


def test_all_workers_together_find_the_planted_noise_scale() -> None:
    found = estimates(runs=40, steps=200, seed=11)
    scales = [noise_scale(GradientNoise(*values) for values in run) for run in found]
    middle = float(np.median([scale for scale in scales if scale is not None]))
    assert middle == pytest.approx(VARIANCE / GRADIENT_SQUARE, rel=0.1)


@given(seed=st.integers(0, 2**32), batches=st.lists(st.integers(1, 50), min_size=2, max_size=5))
@settings(deadline=None, max_examples=examples(50))
def test_all_workers_together_give_the_analysis_of_variance(seed: int, batches: list[int]) -> None:
    rng = np.random.default_rng(seed)
    own = rng.standard_normal((len(batches), 6))
    total = sum(batches)
    mean_D = np.average(own, axis=0, weights=batches)
    between = sum(b * float((g - mean_D) @ (g - mean_D)) for b, g in zip(batches, own, strict=True))
    variance = between / (len(batches) - 1)
    square = float(mean_D @ mean_D) - variance / total
    parts = []
    for b, own_D in zip(batches, own, strict=True):
        estimator = NoiseEstimator()
        for _ in range(12):
            norms = GradientNorms(float(own_D @ own_D), b, float(mean_D @ mean_D), total)
            estimator.add(norms)
        part = estimator.estimate()
        assert part is not None
        parts.append(part)
    weight = sum(part.weight for part in parts)
    assert weight == pytest.approx(len(batches) - 1)
    assert sum(p.weight * p.variance for p in parts) / weight == pytest.approx(variance)
    assert sum(p.weight * p.square for p in parts) / weight == pytest.approx(square, abs=1e-9)


def test_a_single_worker_has_no_estimate() -> None:
    estimator = NoiseEstimator()
    for _ in range(50):
        estimator.add(GradientNorms(1.0, 8, 1.0, 8))
    assert estimator.estimate() is None
    assert noise_scale([]) is None


@given(
    initial=st.integers(1, 300),
    factor=st.integers(1, 40),
    scale=st.floats(0, 1e5),
    samples_per_s=st.floats(1, 1e5),
    fixed_s=st.floats(0, 10),
)
@settings(deadline=None, max_examples=examples(100))
def test_the_choice_is_that_of_brute_force(
    initial: int, factor: int, scale: float, samples_per_s: float, fixed_s: float
) -> None:
    growth = GlobalBatchSize(initial=initial, max=initial * factor, growth=True)
    sizes = np.arange(initial, initial * factor + 1)
    worth = sizes / (fixed_s + sizes / samples_per_s) * (scale + initial) / (scale + sizes)
    chosen = best_batch(growth, scale=scale, samples_per_s=samples_per_s, fixed_s=fixed_s)
    on_grid = {size: worth[size - initial] for size in candidates(initial, initial * factor)}
    assert on_grid[chosen] == pytest.approx(max(on_grid.values()), rel=1e-12)
    if initial >= 8:  # below, whole numbers are farther apart than the grid
        assert on_grid[chosen] >= 0.99 * worth.max()


@pytest.mark.parametrize(
    ("scale", "fixed_s", "chosen"),
    [
        (0.0, 0.5, 100),  # a larger batch has no benefit: iterations as quick as possible
        (1e9, 0.5, 3000),
        (math.inf, 0.5, 3000),
        (500.0, 0.0, 100),  # throughput is the same for every batch
        (2000.0, 0.5, 1000),  # sqrt(0.5 * 1000 * 2000)
    ],
)
def test_no_noise_keeps_the_batch_and_much_noise_grows_it(
    scale: float, fixed_s: float, chosen: int
) -> None:
    growth = GlobalBatchSize(initial=100, max=3000, growth=True)
    found = best_batch(growth, scale=scale, samples_per_s=1000.0, fixed_s=fixed_s)
    assert found == pytest.approx(chosen, rel=0.1)


@given(initial=st.integers(1, 300), factor=st.integers(1, 40), samples_per_s=st.floats(1e-3, 1e9))
@settings(deadline=None, max_examples=examples(100))
def test_of_equally_good_sizes_the_smallest_is_chosen(
    initial: int, factor: int, samples_per_s: float
) -> None:
    """Without fixed time and a measurable gradient, sizes differ only by rounding."""
    growth = GlobalBatchSize(initial=initial, max=initial * factor, growth=True)
    found = best_batch(growth, scale=math.inf, samples_per_s=samples_per_s, fixed_s=0.0)
    assert found == initial


def test_the_size_changes_only_when_due_and_known_also_back() -> None:
    growth = GlobalBatchSize(initial=100, max=3000, every_steps=10, growth=True)
    controller = GoodputController(growth, Rank(0))

    def at(iteration: int, scale: float | None) -> int:
        return controller.at(iteration, scale=scale, samples_per_s=1000.0, fixed_s=0.5)

    assert [at(9, 1e9), at(10, None), at(12, 1e9), at(19, 0.0), at(20, 0.0)] == [
        100, 100, 3000, 3000, 100,
    ]  # fmt: skip
    fixed = GoodputController(GlobalBatchSize(initial=100, max=3000, growth=False), Rank(0))
    assert fixed.at(500, scale=1e9, samples_per_s=1000.0, fixed_s=0.5) == 100
    controller.resume(10**6)
    assert at(21, 0.0) == 3000


def test_a_new_director_keeps_the_size_until_the_next_choice_is_due() -> None:
    controller = GoodputController(
        GlobalBatchSize(initial=100, max=3000, every_steps=10, growth=True), Rank(0)
    )
    controller.resume(200)

    def at(iteration: int, scale: float | None) -> int:
        return controller.at(iteration, scale=scale, samples_per_s=1000.0, fixed_s=0.5)

    assert [at(1, 1e9), at(1234, None), at(1239, 1e9), at(1240, 1e9)] == [200, 200, 200, 3000]


def test_workers_that_resume_from_checkpoints_of_one_period_agree() -> None:
    """A choice of a far period counts once this worker comes near."""
    growth = GlobalBatchSize(initial=100, max=3000, every_steps=10, growth=True)
    first, second = GoodputController(growth, Rank(0)), GoodputController(growth, Rank(1))
    for controller, size, iteration in ((first, 200, 1234), (second, 300, 1238)):
        controller.resume(size, iteration)
        assert controller.at(iteration + 1, scale=None, samples_per_s=1.0, fixed_s=0.5) == size
    assert (first.held, second.held) == (
        BatchChoice(123, Rank(0), 200), BatchChoice(123, Rank(1), 300),
    )  # fmt: skip
    assert second.take(BatchChoice(123, Rank(0), 200))
    assert not first.take(BatchChoice(123, Rank(1), 300))
    sizes = [
        each.at(1239, scale=1e9, samples_per_s=1000.0, fixed_s=0.5) for each in (first, second)
    ]
    assert sizes == [200, 200]
    far = BatchChoice(130, Rank(2), 500)
    assert not first.take(far)
    first.at(1290, scale=None, samples_per_s=1.0, fixed_s=0.5)
    assert first.take(far)
    early = GoodputController(growth, Rank(0))
    early.resume(100, 9)
    assert early.held is None, "no choice was due before the tenth iteration"


def test_the_choice_of_the_latest_period_and_lowest_rank_counts() -> None:
    controller = GoodputController(
        GlobalBatchSize(initial=100, max=3000, every_steps=10, growth=True), Rank(2)
    )

    def at(iteration: int) -> int:
        return controller.at(iteration, scale=1e9, samples_per_s=1000.0, fixed_s=0.5)

    assert not controller.take(BatchChoice(2, Rank(0), 500)), "it must not come next"
    assert at(10) == 3000
    assert controller.held == BatchChoice(1, Rank(2), 3000)
    assert not controller.take(BatchChoice(1, Rank(3), 500))
    assert controller.take(BatchChoice(1, Rank(1), 500))
    assert not controller.take(BatchChoice(1, Rank(1), 500))
    assert at(11) == 500
    assert controller.take(BatchChoice(2, Rank(3), 10**9))
    assert [at(12), at(20)] == [3000, 3000], "kept within the bounds, and not chosen again"
    assert not controller.take(BatchChoice(2**60, Rank(0), 500))


def test_a_restarted_sidecar_keeps_the_size_until_the_next_choice_is_due() -> None:
    job = job_of()
    director = ResourceController(job, Rank(0))
    members = tuple(Member(w, 1, MemberState.READY, "", "") for w in job.workers())
    director.handle(Peers(Membership(1, job.key, len(members), members), 50_000), 0.0)
    noise = GradientNoise(1.0, 1e9, 0.5)
    for rank in (Rank(1), Rank(2)):
        capacity = Capacity(rank, 100.0, 1.0, CapacitySource.RATE, 21, noise=noise, exchange_s=0.5)
        director.handle_capacity(capacity, 1)
    capacities = {Rank(0): 50.0, Rank(1): 100.0, Rank(2): 150.0}
    director.handle(Directive(9, 20, 100, {}, capacities, {}), 0.0)
    chosen = []
    for iteration in (22, 23, 24):
        norms = GradientNorms(1.0, 20, 1.0, 100)
        director.handle(step_of(0, iteration, director, norms), float(iteration))
        assert director.directive is not None
        chosen.append(director.directive.global_batch_size)
    assert chosen == [100, 100, 640]  # every 5 steps


def job_of(**policies: object) -> Job:
    spec: dict[str, object] = {
        "sites": [{"name": "plant", "groups": [{"name": "any", "workers": len(BATCHES)}]}],
        "trainer": {
            "program": {"builtin": "cipher"},
            "dataset": {"name": "digits"},
            "stop": {"maxSteps": 10},
        },
        "batching": {
            "policy": "goodput",
            "globalBatchSize": {"initial": 40, "max": 640, "everySteps": 5},
        },
        "exchange": {"policy": "full"},
        "synchronization": {"mode": "synchronous"},
    }
    return load_job(
        {
            "apiVersion": "dlion.dev/v1alpha1",
            "kind": "DLionJob",
            "metadata": {"name": "digits"},
            "spec": spec | policies,
        }
    )


def step_of(
    rank: int, iteration: int, director: ResourceController, norms: GradientNorms
) -> StepTiming:
    """A step as the trainer reports it: the faster the higher the rank, with half a second of
    exchange."""
    assert director.directive is not None
    samples = director.directive.local_batch_size
    compute_s = samples / (50.0 * (1 + rank))
    timing = StepTiming(
        iteration, samples, compute_s, compute_s + 0.5, compute_s, compute_s, 0.0, norms=norms
    )
    found = decode(encode(timing))
    assert found == timing
    return timing


@pytest.mark.parametrize("scale_factor", [0.0, 1e6])
def test_directors_agree_and_their_shares_sum_to_the_batch(scale_factor: float) -> None:
    job = job_of()
    directors = [ResourceController(job, worker.rank) for worker in job.workers()]
    members = tuple(Member(w, 1, MemberState.READY, "", "") for w in job.workers())
    for director in directors:
        director.handle(Peers(Membership(1, job.key, len(members), members), 50_000), 0.0)
    now_s = 0.0
    for iteration in range(1, 41):
        now_s += 1.0
        sizes = [d.directive.local_batch_size for d in directors if d.directive is not None]
        total = sum(sizes)
        for rank, director in enumerate(directors):
            noise = scale_factor
            norms = GradientNorms(
                1.0 + noise / sizes[rank], sizes[rank], 1.0 + noise / total, total
            )
            director.handle(step_of(rank, iteration, director, norms), now_s)
        for director in directors:
            for peer in directors:
                if peer is not director:
                    director.handle_capacity(peer.own(), 1)
    directives = [director.directive for director in directors]
    assert {one.global_batch_size for one in directives if one is not None} == {
        640 if scale_factor else 40
    }
    assert sum(one.local_batch_size for one in directives if one is not None) == (
        640 if scale_factor else 40
    )
    shares = [one.local_batch_size for one in directives if one is not None]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]


def test_directors_agree_once_they_have_exchanged_their_choices() -> None:
    """With noisy norms, no director has the others' latest ones when it is time to choose."""
    job, rng = job_of(), np.random.default_rng(7)
    directors = [ResourceController(job, worker.rank) for worker in job.workers()]
    members = tuple(Member(w, 1, MemberState.READY, "", "") for w in job.workers())
    for director in directors:
        director.handle(Peers(Membership(1, job.key, len(members), members), 50_000), 0.0)
    all_sizes: set[int] = set()
    for iteration in range(1, 81):
        sizes = [one.directive.local_batch_size for one in directors if one.directive is not None]
        total = sum(sizes)
        for rank, director in enumerate(directors):
            noise = 100 * float(rng.uniform(0.2, 5.0))
            norms = GradientNorms(
                1.0 + noise / sizes[rank], sizes[rank], 1.0 + noise / total, total
            )
            director.handle(step_of(rank, iteration, director, norms), 5.0 * iteration)
        if iteration % 5:
            continue
        for director in directors:
            for peer in directors:
                if peer is not director:
                    director.handle_capacity(peer.own(), 1)
        chosen = {one.directive.global_batch_size for one in directors if one.directive is not None}
        assert len(chosen) == 1
        all_sizes |= chosen
    assert len(all_sizes) > 3


def test_norms_are_reported_only_if_requested_and_whole() -> None:
    gradient_D = np.random.default_rng(1).standard_normal(200_000).astype(np.float32)
    exact = math.fsum(float(value) ** 2 for value in gradient_D)
    assert squared_norm(gradient_D) == pytest.approx(exact, rel=1e-12)
    meter = NormMeter(job_of())
    meter.own(gradient_D, 4)
    assert meter.take() is None  # no update was made
    meter.own(gradient_D, 4)
    meter.mean(2 * gradient_D, 12)
    norms = meter.take()
    assert norms is not None
    assert (norms.own_samples, norms.mean_samples) == (4, 12)
    assert norms.mean_square == pytest.approx(4 * norms.own_square)
    other = NormMeter(job_of(batching={"policy": "weighted"}))
    other.own(gradient_D, 4)
    other.mean(gradient_D, 12)
    assert other.take() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"exchange": {"policy": "dlion"}},
        {"exchange": {"policy": "topk"}},
        {"exchange": {"policy": "dlion", "prioritization": False, "propagation": "selective"}},
        {"exchange": {"policy": "full", "weighting": "dlion_ratio"}},
        {"synchronization": {"mode": "bounded"}},
    ],
)
def test_a_job_without_the_mean_of_whole_gradients_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="mean of whole gradients"):
        job_of(**wrong)
    job_of(exchange={"policy": "dlion", "prioritization": False})

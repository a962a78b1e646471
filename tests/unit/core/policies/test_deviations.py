"""Tests of the detector of wrong contributions of a plausible size: it names bad peers and no
honest ones.

Each cause is named at most once. A norm far above all earlier ones is a cause, and so is opposition
to workers of like data. The others are values of one sign, a lasting difference from workers of
like data, repeated values, and no values.

Not named are workers or sites with other data, a small batch, a slow link, or a model that has
converged. Neither are a jump back to earlier norms, one round of opposition, and sums beyond a
float. One bad peer of three or four cannot get an honest one named. All workers of one of three
sites are named if others have like data.
The manifest determines which workers are compared. With `robustness: off` nothing is found.
Policies with a barrier report the findings. Few entries of a large model take no memory of its
size.

Left out: whole jobs, and attacks that are not found (tests/simulated/test_insiders.py).
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlion_api.names import Rank
from dlion_api.reasons import EventReason
from dlion_api.spec.dataset import Dataset
from dlion_core.codecs import GradientPart, ValueCodec
from dlion_core.policies.aggregation import Contribution
from dlion_core.policies.claims import deviations
from dlion_core.policies.claims.deviations import (
    EMPTY_ROUNDS,
    EMPTY_SAVING_STEPS,
    EMPTY_STEPS,
    GRADIENT_EVERY,
    WINDOW,
    DeviationDetector,
    groups_of_like_data,
)
from dlion_core.policies.claims.sent_entries import SentEntries
from dlion_core.policies.claims.sign_balance import sign_balance
from dlion_core.policies.context import PolicyContext
from dlion_core.policies.gradient.entries import encode_nonzero
from dlion_core.policies.interface import Layout, ReportEvent
from example_counts import examples
from policy_cluster import spec
from weighing_cluster import WeighingCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy.typing import NDArray

    Send = Callable[[int, NDArray[np.float32]], NDArray[np.float32] | None]

SIZE, ROUNDS, BAD = 3000, 60, Rank(1)
SITES = {Rank(0): "a", Rank(1): "a", Rank(2): "a", Rank(3): "b"}


def context(
    policy: str = "adaptive", *, workers: int = 4, robustness: str = "detect", **data: object
) -> PolicyContext:
    """The view of worker 0, one of three at site a; the fourth is at site b."""
    job = spec(exchange={"policy": policy, "robustness": robustness})
    dataset = Dataset(**{"name": "digits", **data})  # type: ignore[arg-type]
    job = replace(job, trainer=replace(job.trainer, dataset=dataset))
    ranks = tuple(map(Rank, range(workers)))
    sites = {rank: SITES.get(rank, "b") for rank in ranks}
    return PolicyContext(job, Rank(0), ranks, Layout(("w",), (SIZE,)), sites)


def named(
    about: PolicyContext,
    bad: Send | None = None,
    *,
    rounds: int = ROUNDS,
    norms: Mapping[int, float] | None = None,
    opposite: Rank | None = None,
    attackers: Collection[Rank] = (BAD,),
    seed: int = 0,
) -> list[str]:
    """Return the findings if worker 1, or these, send this instead of their computed values.

    Honest contributions are a common direction, which changes slowly, plus noise of the same size.
    `norms`: the norms of all from that round on. `opposite`: a worker whose data pull the other
    way.
    """
    rng = np.random.default_rng(seed)
    detector, texts = DeviationDetector(about), []
    common_D = rng.standard_normal(SIZE)
    norm = 1.0
    for at in range(rounds):
        norm = (norms or {}).get(at, norm)
        common_D = 0.8 * common_D + 0.6 * rng.standard_normal(SIZE)
        sent = {}
        for rank in about.ranks:
            sign = -1 if rank == opposite else 1
            value_D = (sign * common_D + rng.standard_normal(SIZE)) * norm / np.sqrt(2 * SIZE)
            honest_D = value_D.astype(np.float32)
            found_D = bad(at, honest_D) if bad is not None and rank in attackers else honest_D
            part = None if found_D is None else GradientPart(found_D)
            sent[rank] = Contribution(8, part)
        texts += detector.detect(sent)
    return texts


def constant(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.linspace(-1, 1, SIZE, dtype=np.float32) / np.float32(32)


def drip(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
    return honest_D + constant(at, honest_D)


@pytest.mark.parametrize(
    ("send", "text"),
    [
        (lambda _, honest_D: 100 * honest_D, "worker 1 contributes values with the norm"),
        (lambda _, honest_D: -honest_D, "worker 1 contributes values that oppose"),
        (lambda _, honest_D: -3 * honest_D, "worker 1 contributes values that oppose"),
        (drip, "worker 1 contributes values that differ from those of workers of like data"),
        (lambda *_: None, "worker 1 has contributed samples and no values in"),
        (lambda _, honest_D: 0 * honest_D, "worker 1 has contributed samples and no values in"),
        (lambda at, honest_D: honest_D if at < 30 else 1e9 * honest_D, "worker 1 contributes"),
    ],
)
@pytest.mark.parametrize("workers", [3, 4])
def test_a_worker_that_deviates_is_named_once(send: Send, text: str, workers: int) -> None:
    (found,) = named(context(workers=workers), send)
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("send", "text"),
    [
        (lambda _, honest_D: 100 * honest_D, "contributes values with the norm"),
        (lambda _, honest_D: abs(honest_D), "contributes values of one sign"),
        (lambda _, honest_D: -honest_D, "contributes values that oppose"),
        (drip, "contributes values that differ from those of workers of like data"),
        (lambda *_: None, "has contributed samples and no values in"),
    ],
)
def test_all_workers_of_one_of_three_sites_are_named(send: Send, text: str) -> None:
    """They agree, so none is compared with another of its site."""
    about = replace(context(workers=6), sites={Rank(rank): "abc"[rank // 2] for rank in range(6)})
    found = named(about, send, attackers=(Rank(2), Rank(3)))
    assert {one.split()[1] for one in found} == {"2", "3"}
    assert sum(text in one for one in found) == 2
    assert named(about) == []


@pytest.mark.parametrize("data", [{"partition": "bySite"}, {"partition": "dirichlet"}])
@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize(
    "send", [lambda _, honest_D: 6 * honest_D, lambda _, honest_D: abs(honest_D)]
)
def test_a_site_whose_own_data_make_other_values_is_not_named(
    send: Send, each: int, data: dict[str, object]
) -> None:
    """Such as features that are not scaled. One of its workers alone is named."""
    ranks = list(map(Rank, range(3 * each)))
    sites = {rank: "abc"[rank // each] for rank in ranks}
    about = replace(context(workers=len(ranks), **data), sites=sites)
    assert named(about, send, attackers=ranks[each : 2 * each]) == []
    (found,) = named(about, send, attackers=[ranks[each]])
    assert found.startswith(f"worker {each} contributes values")


@pytest.mark.parametrize("workers", [3, 4])
def test_a_constant_contribution_lasts_and_is_repeated(workers: int) -> None:
    lasting, repeated = named(context(workers=workers), constant)
    assert lasting.startswith("worker 1 contributes values that differ from those of workers of")
    assert repeated.startswith(f"worker 1 contributes what it contributed {WINDOW} measured")


@pytest.mark.parametrize("other", [{}, {"partition": "bySite"}, {"partition": "dirichlet"}])
def test_a_small_deviation_in_each_entry_is_named_soon(other: dict[str, object]) -> None:
    """*Little is enough*: the mean of all less 1.5 standard deviations, in four rounds."""
    about, rng, texts = context(**other), np.random.default_rng(6), list[str]()
    detector, common_D = DeviationDetector(about), rng.standard_normal(SIZE)
    for _ in range(4):
        value_PD = common_D + rng.standard_normal((len(about.ranks), SIZE))
        value_PD[BAD] = value_PD.mean(axis=0) - 1.5 * value_PD.std(axis=0)
        parts = [GradientPart(one.astype(np.float32)) for one in value_PD]
        texts += detector.detect({rank: Contribution(8, parts[rank]) for rank in about.ranks})
    (found,) = texts
    assert found.startswith("worker 1 contributes values of one sign: 83%"), found


@pytest.mark.parametrize("one_sided", [range(4), (0, 3), (2, 3)])
def test_if_another_worker_has_one_sign_too_no_worker_is_named(one_sided: Collection[int]) -> None:
    detector, rng = DeviationDetector(context()), np.random.default_rng(7)
    for _ in range(ROUNDS):
        value_PD = rng.standard_normal((4, SIZE)).astype(np.float32)
        value_PD[list(one_sided)] = abs(value_PD[list(one_sided)])
        parts = enumerate(map(GradientPart, value_PD))
        assert not detector.detect({Rank(rank): Contribution(8, part) for rank, part in parts})


@pytest.mark.parametrize(
    ("workers", "flippers"), [(3, 1), (4, 1), (5, 1), (5, 2), (6, 2), (7, 3), (9, 4), (4, 2)]
)
def test_a_minority_that_flips_signs_is_named(workers: int, flippers: int) -> None:
    about, rng, texts = context(workers=workers), np.random.default_rng(9), list[str]()
    detector, common_D = DeviationDetector(about), rng.standard_normal(SIZE)
    bad = range(1, 1 + flippers)
    for _ in range(10):
        sent = {}
        for rank in about.ranks:
            value_D = (common_D + rng.standard_normal(SIZE)) * (-1 if rank in bad else 1)
            sent[rank] = Contribution(8, GradientPart(value_D.astype(np.float32)))
        texts += detector.detect(sent)
    named_ranks = {int(text.split()[1]) for text in texts}
    assert named_ranks == (set(bad) if 2 * flippers < workers else set())


def measured(secret: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rounds that are measured, each with its first block."""
    about, found, now = replace(context("dlion"), secret=secret), list[tuple[int, int]](), [0]

    def look_on(sent: SentEntries, first_block: int) -> float | None:
        found.append((now[0], first_block))
        return sign_balance(sent, first_block)

    monkeypatch.setattr(deviations, "sign_balance", look_on)
    detector, part = DeviationDetector(about), GradientPart(np.ones(SIZE, np.float32))
    for now[0] in range(WINDOW + 10 * GRADIENT_EVERY):
        detector.detect({rank: Contribution(8, part) for rank in about.ranks})
    return sorted(set(found))


def test_rounds_and_blocks_follow_from_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same, other = (measured(secret, monkeypatch) for secret in (1, 1, 2))
    assert one == same
    assert [at for at, _ in one] != [at for at, _ in other]
    assert not {block for _, block in one} & {block for _, block in other}


def test_flipped_signs_are_named_after_few_rounds_but_not_after_one() -> None:
    def once(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
        return -honest_D if at % 4 == 0 else honest_D

    for workers in (3, 4):
        about = context(workers=workers)
        assert named(about, once) == []
        assert named(about, lambda _, honest_D: -honest_D, rounds=1) == []
        assert len(named(about, lambda _, honest_D: -honest_D, rounds=4)) == 1


def test_after_convergence_opposition_to_workers_that_disagree_is_not_named() -> None:
    """Honest contributions cancel then: one opposes three that are at right angles."""
    detector, rng = DeviationDetector(context()), np.random.default_rng(8)
    for _ in range(ROUNDS):
        value_PD = rng.standard_normal((4, SIZE)).astype(np.float32)
        value_PD[BAD] = value_PD[BAD] - value_PD.sum(axis=0)
        parts = enumerate(map(GradientPart, value_PD))
        assert not detector.detect({Rank(rank): Contribution(8, part) for rank, part in parts})


@pytest.mark.parametrize(("size", "is_named"), [(1e-3, False), (0.02, False), (0.1, True)])
@pytest.mark.parametrize(
    ("send", "text"),
    [
        (lambda at, honest_D, size: honest_D + size * constant(at, honest_D), "differ from those"),
        (lambda _, honest_D, size: honest_D + size / 50, "values of one sign"),
        (lambda at, honest_D, size: size * constant(at, honest_D), "measured rounds ago"),
    ],
)
def test_after_convergence_a_contribution_counts_by_its_size(
    send: Callable[..., NDArray[np.float32]], text: str, size: float, is_named: bool
) -> None:
    """Own samples, or what its links kept back, set an honest worker apart then, with the small
    norm of all contributions."""

    def apart(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
        return honest_D if at < WINDOW else send(at, honest_D, np.float32(size))

    texts = named(context(), apart, norms={WINDOW: 1e-3}, rounds=100)
    assert any(text in found for found in texts) == is_named


def test_a_large_contribution_is_named_in_the_second_round_before_divergence() -> None:
    about = context()
    assert named(about, lambda _, honest_D: 100 * honest_D, rounds=1) == []
    assert len(named(about, lambda _, honest_D: 100 * honest_D, rounds=2)) == 1


@pytest.mark.parametrize(("policy", "is_named"), [("dlion", False), ("full", True)])
def test_values_that_a_slow_link_drops_are_no_lasting_difference(
    policy: str, is_named: bool
) -> None:
    """Its largest ones arrive in each step, and the small ones never."""
    about, rng, texts = context(policy), np.random.default_rng(11), list[str]()
    detector, common_D = DeviationDetector(about), rng.standard_normal(SIZE)
    for _ in range(ROUNDS):
        value_PD = (common_D + 0.3 * rng.standard_normal((4, SIZE))).astype(np.float32)
        value_PD[BAD][abs(value_PD[BAD]) < 1] = 0
        parts = enumerate(map(GradientPart, value_PD))
        texts += detector.detect({Rank(rank): Contribution(8, part) for rank, part in parts})
    assert any("differ from those" in text for text in texts) == bool(texts) == is_named


@given(seed=st.integers(0, 10**6), workers=st.sampled_from([2, 3, 4]))
@settings(max_examples=examples(30), deadline=None)
def test_honest_workers_are_not_named(seed: int, workers: int) -> None:
    assert named(context(workers=workers), seed=seed) == []
    late = {0: 5.0, 10: 1e-7, 40: 5.0, 41: 1e-7}
    assert named(context(workers=workers), norms=late, seed=seed) == [], "a merge, a restart"


def test_of_two_workers_none_is_named() -> None:
    about = context(workers=2)
    for send in (lambda _, honest_D: 1e6 * honest_D, lambda _, honest_D: -honest_D):
        assert named(about, send) == []


def test_a_worker_with_other_data_is_not_named() -> None:
    """When two sites balance, their contributions are opposite."""
    about = context(partition="bySite")
    assert named(about, opposite=Rank(3)) == []
    assert named(context(partition="dirichlet"), opposite=Rank(3)) == []
    (found,) = named(about, lambda _, honest_D: -honest_D, opposite=Rank(3))
    assert found.startswith("worker 1 contributes values that oppose")


def test_a_small_batch_or_a_converged_model_names_no_worker() -> None:
    rng = np.random.default_rng(1)

    def noisy(_: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
        return honest_D + (rng.standard_normal(SIZE) / 15).astype(np.float32)

    assert named(context(), noisy) == []
    assert named(context(), lambda _, honest_D: 1e-9 * honest_D) == []


@pytest.mark.parametrize("workers", [3, 4])
def test_a_bad_worker_cannot_get_an_honest_one_named(workers: int) -> None:
    """It sends the opposite of worker 2's values, or is so large that it decides the sum."""
    about, detector = context(workers=workers), DeviationDetector(context(workers=workers))
    rng = np.random.default_rng(3)
    common_D, texts = rng.standard_normal(SIZE), []
    for _ in range(ROUNDS):
        sent = {
            rank: (common_D + rng.standard_normal(SIZE)).astype(np.float32) for rank in about.ranks
        }
        sent[BAD] = np.float32(-4) * sent[Rank(2)]
        texts += detector.detect({r: Contribution(8, GradientPart(one)) for r, one in sent.items()})
    assert {text.split()[1] for text in texts} == {"1"}, texts


def test_growth_of_workers_that_a_robust_sum_leaves_out_is_honest() -> None:
    """Under `trimmed` and `krum` no worker learns what only one site has data for."""

    def growing(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
        return honest_D * np.float32(1 + at)

    for method, is_named in (("krum", False), ("trimmed", False), ("clip", True)):
        about = context(robustness=method, partition="dirichlet")
        assert bool(named(about, growing)) is is_named, method


@pytest.mark.parametrize("scale", [1e19, 1e37])
def test_sums_beyond_a_float_are_large(scale: float) -> None:
    (found,) = named(context(), lambda _, honest_D: np.float32(scale) * honest_D)
    assert found.startswith("worker 1 contributes values with the norm")


def test_links_that_carry_nothing_for_a_while_name_no_worker() -> None:
    def rare(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32] | None:
        return honest_D if at % (EMPTY_STEPS - 1) == 0 else None

    assert EMPTY_STEPS > EMPTY_ROUNDS
    assert named(context("dgc"), rare, rounds=3 * EMPTY_STEPS) == []
    assert len(named(context("dgc"), lambda *_: None, rounds=EMPTY_STEPS)) == 1


def test_a_first_round_in_which_no_link_carries_an_entry_names_no_worker() -> None:
    """So it is for a worker that repeats an iteration of the others, of which all sent it only
    their progress."""
    detector = DeviationDetector(context())
    assert detector.detect({Rank(rank): Contribution(8, None) for rank in (1, 2, 3)}) == []


def test_few_entries_of_a_large_model_take_no_memory_of_its_size() -> None:
    about = replace(context("topk"), layout=Layout(("w",), (1_000_000,)))
    detector, some_D = DeviationDetector(about), np.zeros(1_000_000, np.float32)
    some_D[::1000] = 1
    part = encode_nonzero(some_D, ValueCodec.FLOAT32).part
    sent = {rank: Contribution(8, part) for rank in about.ranks}
    detector.detect(sent)
    tracemalloc.start()
    try:
        detector.detect(sent)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 0.1 * some_D.nbytes


def test_a_link_that_accumulates_budget_for_a_message_may_be_silent_for_longer() -> None:
    detector = DeviationDetector(context("dlion"))
    other_D = np.ones(SIZE, np.float32)
    sent = {rank: Contribution(8, GradientPart(other_D)) for rank in map(Rank, range(4))}
    sent[BAD] = Contribution(8, None)
    rounds = [detector.detect(sent) for _ in range(EMPTY_SAVING_STEPS)]
    assert not any(rounds[:-1])
    assert len(rounds[-1]) == 1


def test_noise_of_a_much_smaller_batch_is_not_named_without_earlier_rounds() -> None:
    """After a restart near a minimum, the norm decreases with the root of the samples."""
    detector, rng = DeviationDetector(context()), np.random.default_rng(4)
    batches, texts = {Rank(0): 100, BAD: 1, Rank(2): 80, Rank(3): 60}, []

    def sent(factor: float) -> dict[Rank, Contribution]:
        noise = {rank: rng.standard_normal(SIZE) / np.sqrt(n) for rank, n in batches.items()}
        noise[BAD] *= factor
        return {
            rank: Contribution(batches[rank], GradientPart(one.astype(np.float32)))
            for rank, one in noise.items()
        }

    for _ in range(ROUNDS):
        texts += detector.detect(sent(1.0))
    assert texts == []
    for _ in range(2):
        texts += detector.detect(sent(6.0))
    assert len(texts) == 1


@pytest.mark.parametrize("silent", [0, 14])
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_residuals_of_a_slow_link_are_not_named(silent: int, share: float) -> None:
    """Policies with residuals send seldom or few entries, each the sum of many steps."""
    about = context("dlion")
    exchange = replace(about.spec.exchange, residual="perLink")
    about = replace(about, spec=replace(about.spec, exchange=exchange))
    rng = np.random.default_rng(5)
    steady_D = rng.standard_normal(SIZE)
    for factor, is_named in ((1.0, False), (12.0, True)):
        detector, rest_D, texts = DeviationDetector(about), np.zeros(SIZE), list[str]()
        for at in range(300):
            sent = {}
            for rank in about.ranks:
                value_D = steady_D + rng.standard_normal(SIZE)
                part: GradientPart | None = GradientPart(value_D.astype(np.float32))
                if rank == BAD:
                    rest_D += value_D
                    part = None
                    if at % (silent + 1) == silent:
                        where_K = np.argsort(np.abs(rest_D))[-int(share * SIZE) :]
                        sent_D = np.zeros(SIZE, np.float32)
                        sent_D[where_K] = factor * rest_D[where_K]
                        rest_D[where_K] = 0
                        part = encode_nonzero(sent_D, ValueCodec.FLOAT32).part
                sent[rank] = Contribution(8, part)
            texts += detector.detect(sent)
        if share == 1.0 or not is_named:
            assert any("norm" in text for text in texts) is is_named, (factor, texts)


def test_a_worker_that_returns_starts_without_history() -> None:
    detector, rng = DeviationDetector(context()), np.random.default_rng(0)
    texts = []
    for _ in range(60):
        common_D = rng.standard_normal(SIZE)
        sent = {
            rank: Contribution(
                8,
                GradientPart((common_D * (-1 if rank == BAD else 1)).astype(np.float32)),
            )
            for rank in map(Rank, range(4))
        }
        texts += detector.detect(sent)
        detector.forget(BAD)
    assert texts == []


@pytest.mark.parametrize(
    ("data", "groups"),
    [
        ({}, [{0, 1, 2, 3}]),
        ({"partition": "bySite"}, [{0, 1, 2}, {3}]),
        ({"partition": "dirichlet"}, []),
        ({"name": None, "path": "train.npz", "format": "npz"}, [{0, 1, 2}, {3}]),
        ({"name": None, "path": "{site}.npz", "format": "npz"}, [{0, 1, 2}, {3}]),
        ({"name": None, "path": "{index}.npz", "format": "npz"}, []),
        ({"name": None}, []),
    ],
)
def test_the_manifest_determines_which_workers_are_compared(
    data: dict[str, object], groups: list[set[int]]
) -> None:
    assert [set(one) for one in groups_of_like_data(context(**data))] == groups


@pytest.mark.parametrize("policy", ["adaptive", "dlion", "full", "sparseloco", "topk"])
@pytest.mark.parametrize("robustness", ["off", "detect"])
def test_policies_with_a_barrier_report_the_findings(policy: str, robustness: str) -> None:
    parameters = {"localSteps": 1} if policy in ("adaptive", "sparseloco") else {}
    exchange = {"policy": policy, "robustness": robustness, "parameters": parameters}
    cluster = WeighingCluster(spec(exchange=exchange), [4] * 4)
    rng = np.random.default_rng(0)
    for _ in range(3):
        for rank in cluster.ranks:
            scale = 100 if rank == BAD else 1
            gradient_D = scale * rng.standard_normal(cluster.layout.size)
            cluster.step(rank, gradient_D.astype(np.float32))
        cluster.deliver_all()
    for rank in cluster.ranks:
        texts = [
            one.text
            for one in cluster.replicas[rank].instructions
            if isinstance(one, ReportEvent) and one.reason is EventReason.UNUSUAL_VALUES
        ]
        is_reported = robustness == "detect" and rank != BAD
        assert [text.split()[1] for text in texts] == ["1"] * is_reported, texts


def test_the_first_and_then_each_fourth_gradient_is_measured() -> None:
    """An attack that begins late is found, too."""

    def late(at: int, honest_D: NDArray[np.float32]) -> NDArray[np.float32]:
        return honest_D if at < WINDOW else 100 * honest_D

    about = context("full")
    last = WINDOW + GRADIENT_EVERY
    assert named(about, late, rounds=last) == []
    assert len(named(about, late, rounds=last + 1)) == 1

"""Facts: ε of a summary is that of Gaussian mechanisms in sequence, by the closed form and by two
other accountants; a use more is never cheaper; restarts add up, also those that reported no step; a
run without privacy has none.

Left out: that steps keep to what is accounted (tests/unit/worker/training/test_private_model.py).
"""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, StepRecord
from dlion_api.reasons import EventReason
from dlion_api.spec.privacy import MIN_NOISE_MULTIPLIER, Privacy
from dlion_results.summary.privacy import epsilon, privacy_sentence, privacy_spent
from dlion_results.summary.tally import WorkerTally


def _privacy(multiplier: float, delta: float = 1e-5) -> Privacy:
    return Privacy(clip_norm=1.0, noise_multiplier=multiplier, delta=delta)


def _delta(privacy: Privacy, uses: int, found: float) -> float:
    """Of Gaussian mechanisms in sequence at that ε (Balle and Wang 2018, theorem 8)."""
    mu = math.sqrt(uses) / privacy.noise_multiplier

    def normal(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    return normal(mu / 2 - found / mu) - math.exp(found) * normal(-mu / 2 - found / mu)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize(("multiplier", "uses"), [(1.0, 1), (2.0, 11), (8.0, 300), (0.8, 4)])
def test_epsilon_is_that_of_the_closed_form(multiplier: float, uses: int, delta: float) -> None:
    privacy = _privacy(multiplier, delta)
    assert _delta(privacy, uses, epsilon(privacy, uses)) == pytest.approx(delta, rel=1e-4)


@pytest.mark.parametrize(("multiplier", "uses"), [(1.0, 1), (4.0, 11)])
def test_other_accountants_agree(multiplier: float, uses: int) -> None:
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(multiplier), uses)
    by_losses, by_renyi = PLDAccountant(), RdpAccountant()
    for each in (by_losses, by_renyi):
        each.compose(event)
    found = epsilon(_privacy(multiplier), uses)
    assert by_losses.get_epsilon(1e-5) == pytest.approx(found, rel=1e-3)
    assert found < by_renyi.get_epsilon(1e-5) < 1.15 * found  # its bound is looser


def test_the_known_value_of_one_use() -> None:
    assert epsilon(_privacy(1.0), 1) == pytest.approx(4.377, abs=1e-3)


def test_uses_cost_and_noise_saves() -> None:
    costs = [epsilon(_privacy(3.0), uses) for uses in (0, 1, 2, 10, 1000, 10**6)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))
    assert epsilon(_privacy(3.1), 10) < epsilon(_privacy(3.0), 10)
    assert epsilon(_privacy(1000.0, 0.1), 1) == 0.0
    assert math.isfinite(epsilon(_privacy(MIN_NOISE_MULTIPLIER, 1e-300), 10**9))


def _step(incarnation: int, passes: int | None, earlier: int | None = None) -> StepRecord:
    return StepRecord(
        time_s=1.0, rank=Rank(0), incarnation=incarnation, iteration=1, loss=math.nan,
        local_batch_size=8, global_batch_size=8, learning_rate=0.1, compute_s=0.1, wall_s=0.1,
        cpu_s=0.1, exchange_cpu_s=0.0, waited_s=0.0, samples=8, passes=passes,
        earlier_passes=earlier,
    )  # fmt: skip


def test_every_start_counts_its_passes_and_one_that_it_may_not_have_reported() -> None:
    worker = WorkerTally(Rank(0))
    for incarnation, passes in [(7, 1), (7, 2), (7, 3), (9, 1), (9, 1)]:
        worker.add_step(_step(incarnation, passes))
    assert worker.sample_uses == (3 + 1) + (1 + 1)
    assert privacy_spent(_privacy(2.0), worker) == {
        "uses": 6, "epsilon": epsilon(_privacy(2.0), 6), "delta": 1e-5,
    }  # fmt: skip
    assert worker.loss_count == 0
    assert privacy_spent(None, worker) is None


def _ready() -> EventRecord:
    return EventRecord(1.0, Rank(0), 0, EventReason.WORKER_READY, "incarnation 8 is ready to train")


def test_starts_that_reported_no_step_count() -> None:
    worker = WorkerTally(Rank(0))
    worker.add_event(_ready())
    worker.add_step(_step(7, 1, 0))
    for _ in range(5):  # each is killed between its first message and its first report
        worker.add_event(_ready())
    assert worker.sample_uses == (1 + 1) + 5
    worker.add_event(_ready())
    worker.add_step(_step(13, 1, 9))  # one of them had begun four passes
    worker.add_step(_step(13, 2, 9))
    assert worker.sample_uses == 9 + 2 + 1
    worker.add_step(_step(20, 1, 0))  # in a new folder
    assert worker.sample_uses == 12 + 1 + 1


def test_the_sentence_names_the_worker_that_spent_most() -> None:
    def row(name: str, uses: int) -> dict[str, object]:
        spent = {"uses": uses, "epsilon": epsilon(_privacy(2.0), uses), "delta": 1e-5}
        return {"name": name, "privacy": spent}

    sentence = privacy_sentence([row("a/g-0", 3), row("b/g-0", 11)])
    assert "b/g-0 made up to 11 uses" in sentence
    assert f"ε ≤ {epsilon(_privacy(2.0), 11):.3g} at δ = 1e-05" in sentence
    assert privacy_sentence([{"name": "a/g-0", "privacy": None}, {"name": "old"}]) == ""

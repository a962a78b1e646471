"""Tests of ε in a summary.

It is that of Gaussian mechanisms in sequence, by the closed form and by two other accountants. More
uses never cost less. Restarts add up, also those that reported no step. A worker without a record
is unknown. Missed records make ε a lower bound, also in the report. A run without privacy has no ε.

Left out: that steps match the accounting (tests/unit/worker/training/test_private_model.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dlion_api.names import Rank
from dlion_api.protocol.progress import EventRecord, StepRecord
from dlion_api.reasons import RECORDS_MISSED, EventReason
from dlion_api.spec import load_job
from dlion_api.spec.privacy import MIN_NOISE_MULTIPLIER, Privacy
from dlion_results.report.page import render
from dlion_results.report.runs import LoadedRun
from dlion_results.report.tiles import tiles
from dlion_results.summary.privacy import epsilon, privacy_sentence, privacy_spent
from dlion_results.summary.summary import Ending, summarise
from dlion_results.summary.tally import RunTally, WorkerTally
from synthetic_run import Story, description


def _privacy(multiplier: float, delta: float = 1e-5) -> Privacy:
    return Privacy(clip_norm=1.0, noise_multiplier=multiplier, delta=delta)


def _delta(privacy: Privacy, uses: int, found: float) -> float:
    """δ of Gaussian mechanisms in sequence at that ε (Balle and Wang 2018, theorem 8)."""
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


def test_uses_raise_epsilon_and_noise_lowers_it() -> None:
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


def test_every_start_counts_its_passes_and_one_that_may_be_unreported() -> None:
    worker = WorkerTally(Rank(0))
    for incarnation, passes in [(7, 1), (7, 2), (7, 3), (9, 1), (9, 1)]:
        worker.add_step(_step(incarnation, passes))
    assert worker.sample_uses == (3 + 1) + (1 + 1)
    assert privacy_spent(_privacy(2.0), worker, complete=True) == {
        "uses": 6, "epsilon": epsilon(_privacy(2.0), 6), "delta": 1e-5, "complete": True,
    }  # fmt: skip
    assert worker.loss_count == 0
    assert privacy_spent(None, worker, complete=True) is None


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
    worker.add_step(_step(13, 1, 9))  # one of them had started four passes
    worker.add_step(_step(13, 2, 9))
    assert worker.sample_uses == 9 + 2 + 1
    worker.add_step(_step(20, 1, 0))  # in a new folder
    assert worker.sample_uses == 12 + 1 + 1


def _row(name: str, uses: int | None, *, complete: bool = True) -> dict[str, Any]:
    worker = WorkerTally(Rank(0))
    if uses is not None:
        worker.add_step(_step(1, uses - 1))
    return {"name": name, "privacy": privacy_spent(_privacy(2.0), worker, complete=complete)}


def test_the_sentence_names_the_worker_that_spent_most() -> None:
    sentence = privacy_sentence([_row("a/g-0", 3), _row("b/g-0", 11)])
    assert "b/g-0 made up to 11 uses" in sentence
    assert f"ε ≤ {epsilon(_privacy(2.0), 11):.3g} at δ = 1e-05" in sentence
    assert privacy_sentence([{"name": "a/g-0", "privacy": None}]) == ""


def test_a_worker_without_a_record_is_unknown_and_not_free() -> None:
    sentence = privacy_sentence([_row("a/g-0", None), _row("b/g-0", 3), _row("b/g-1", None)])
    assert "b/g-0 made up to 3 uses; unknown for a/g-0 and 1 more, without a record" in sentence
    alone = privacy_sentence([_row("a/g-0", None)])
    assert alone == "Privacy: unknown for a/g-0, without a record of a step"


def test_missed_records_make_epsilon_a_lower_bound() -> None:
    sentence = privacy_sentence([_row("a/g-0", 3, complete=False)])
    assert f"ε at least {epsilon(_privacy(2.0), 3):.3g} at" in sentence
    assert "records of steps are missing" in sentence


def test_summary_and_report_show_unknown_workers_and_missed_records() -> None:
    document = description(Story(workers=2, seconds=60, killed=None)).to_document()
    document["spec"]["trainer"]["privacy"] = {"clipNorm": 1, "noiseMultiplier": 2}
    document["spec"]["knowledgeTransfer"] = {"policy": "none"}
    job = load_job(document)
    tally = RunTally(worker.rank for worker in job.workers())
    second = job.workers()[1].rank
    tally.add(replace(_step(7, 2), rank=second))
    for missed in (False, True):
        if missed:
            tally.add(EventRecord(2.0, Rank(0), 0, RECORDS_MISSED, "3 records", warning=True))
        summary = summarise(job, tally, ending=Ending("maxSteps reached"))
        first, other = (worker["privacy"] for worker in summary["workers"][:2])
        assert (first["uses"], first["epsilon"], other["uses"]) == (None, None, 3)
        assert first["complete"] is other["complete"] is not missed
        run = LoadedRun("a", job, tally, summary, None, "")
        value = tiles([run])[-1].values[0]
        found = f"{epsilon(_privacy(2.0), 3):.3g}"
        assert value.text == (f"ε at least {found}" if missed else f"ε ≤ {found}")
        assert "1 more unknown" in value.note
        page = render([run])
        assert "<td>unknown</td>" in page
        assert (f"<td>≥ {found}</td>" if missed else f"<td>{found}</td>") in page

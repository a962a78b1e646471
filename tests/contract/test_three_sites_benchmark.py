"""Tests of benchmarks/federation on small runs written by hand, without a cluster or training.

The submitted job fits its environment. The figures read from the records of several sites match the
events of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from dlion_api.names import Rank
from dlion_api.protocol.progress import EvaluationRecord, EventRecord, ProgressRecord, StepRecord
from dlion_api.spec import load_job
from dlion_environments.loading import load_environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FOLDER = BENCHMARKS / "federation"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def run_records() -> ModuleType:
    import run_records

    return run_records


@pytest.fixture
def pairs() -> ModuleType:
    import pairs

    return pairs


def step(time_s: float, rank: int, iteration: int, *, incarnation: int = 1) -> StepRecord:
    return StepRecord(
        time_s=time_s, rank=Rank(rank), incarnation=incarnation, iteration=iteration, loss=1.0,
        local_batch_size=100, global_batch_size=200, learning_rate=0.1, compute_s=0.5, wall_s=1.0,
        cpu_s=0.5, exchange_cpu_s=0.1, waited_s=0.1, samples=100 * iteration,
    )  # fmt: skip


def evaluation(
    time_s: float, rank: int, sketch: tuple[float, ...], *, final: bool = False
) -> EvaluationRecord:
    return EvaluationRecord(
        time_s=time_s, rank=Rank(rank), iteration=1, samples=100, accuracy=0.5, loss=1.0,
        evaluated_samples=10, sketch=sketch, weights_norm=2.0, final=final,
    )  # fmt: skip


def test_the_job_names_the_testbeds_sites_and_fits_its_environment() -> None:
    document = yaml.safe_load((FOLDER / "job.yaml").read_text())
    job = load_job(document)
    assert [site.name for site in job.spec.sites] == ["site-a", "site-b", "site-c"]
    environment = load_environment(str(FOLDER / "one-cluster.yaml"))
    limits = [
        int(group["resources"]["limits"]["cpu"].removesuffix("m")) / 1000
        for site in document["spec"]["sites"]
        for group in site["groups"]
    ]
    assert [worker.cores for worker in environment.workers for _ in range(worker.count)] == limits


def test_sites_records_are_one_run_on_one_clock(run_records: ModuleType) -> None:
    # Site a began at 100 s of the machine's clock, site b 3 s later.
    by_site: dict[str, list[ProgressRecord]] = {
        "a": [step(11.0, 0, 1), step(12.0, 0, 2), step(17.0, 0, 3)],
        "b": [step(8.5, 1, 1), step(9.5, 1, 2), step(14.5, 1, 3, incarnation=2)],
    }
    records = run_records.on_one_clock(by_site, {"a": 100.0, "b": 103.0})
    assert [each.time_s for each in records] == [111.0, 111.5, 112.0, 112.5, 117.0, 117.5]
    # Six steps of 100 samples between 110.0 (the start of the first one) and 117.5.
    assert run_records.samples_per_s(records) == pytest.approx(600 / 7.5)
    between = run_records.pace(records, 0, 111.5, 118.0)
    assert (between.iterations, between.longest_gap_s) == (2, 5.0)
    assert run_records.iteration_at(records, 112.2) == 2
    assert run_records.time_of(records, 3) == 117.0
    assert run_records.incarnations(records, 1, 113.0) == {1}
    assert run_records.first_step(records, 1, known={1}).time_s == 117.5
    assert run_records.first_step(records, 0, known={1}) is None


def test_a_worker_that_never_steps_has_a_gap_of_the_whole_time(
    run_records: ModuleType,
) -> None:
    still = run_records.pace([step(1.0, 0, 1)], 0, 5.0, 65.0)
    assert (still.iterations, still.longest_gap_s) == (0, 60.0)


def test_drift_has_recovered_when_it_is_not_above_its_earlier_value(
    run_records: ModuleType,
) -> None:
    records = [
        evaluation(at_s, rank, (apart * rank, 0.0))
        for at_s, apart in ((1.0, 0.2), (2.0, 0.8), (3.0, 0.4), (4.0, 0.2))
        for rank in (0, 1)
    ]
    curve = run_records.drift_curve(records)
    assert curve == [pytest.approx(point) for point in ((1, 0.1), (2, 0.4), (3, 0.2), (4, 0.1))]
    assert run_records.max_drift(curve, 0.0, 1.5) == pytest.approx(0.1)
    assert run_records.back_at(curve, 0.1 + 1e-9, 1.5) == 4.0
    assert run_records.back_at(curve, 0.05, 1.5) is None


def test_only_last_evaluations_are_final_and_only_events_are_counted(
    run_records: ModuleType,
) -> None:
    def event(time_s: float, reason: str) -> EventRecord:
        return EventRecord(time_s, Rank(0), 1, reason, "words")

    records = [
        event(1.0, "WorkerLost"), event(2.0, "WorkerLost"), event(3.0, "FoldedTogether"),
        evaluation(1.0, 0, (0.0,)), evaluation(2.0, 1, (0.0,), final=True),
    ]  # fmt: skip
    assert set(run_records.final_accuracies(records)) == {1}
    assert run_records.counted_events(records, 1.5, 9.0) == {"FoldedTogether": 1, "WorkerLost": 1}


@pytest.mark.parametrize(
    ("cluster", "alone", "speed", "seeds", "images", "met"),
    [
        (0.65, 0.58, 800.0, 5, 10_000, [True, True, True]),
        (0.68, 0.61, 2000.0, 5, 10_000, [False, False, False]),
        (0.65, 0.58, 800.0, 4, 10_000, [False, False, True]),  # too few seeds for an accuracy
        (0.65, 0.58, 800.0, 5, 1_000, [True]),  # too few images for any accuracy
    ],
)
def test_runs_of_the_same_seed_are_compared(
    pairs: ModuleType,
    cluster: float,
    alone: float,
    speed: float,
    seeds: int,
    images: int,
    met: list[bool],
) -> None:
    from measured import Measured

    def part(name: str, accuracy: float, samples_per_s: float) -> Any:
        figures = {
            "accuracy": accuracy,
            "samples_per_s": samples_per_s,
            "evaluated_samples": images,
        }
        return Measured(name, figures, commit="x")

    found = {"train-9": part("train-9", 0.10, 1.0)}  # no run to compare it with
    for seed in range(1, seeds + 1):
        found |= {
            f"train-{seed}": part(f"train-{seed}", 0.64, 500.0),
            f"cluster-{seed}": part(f"cluster-{seed}", cluster, 0.0),
            f"alone-{seed}": part(f"alone-{seed}", alone, speed),
        }
    bars: Iterator[Any] = pairs.pairs(found)
    assert [bar.met for bar in bars] == met


def test_measurements_are_stored_with_their_manifest(tmp_path: Path) -> None:
    from measured import Bar, Measured

    manifest = {"spec": {"network": {"exposure": "PodNetwork"}}}
    assert Measured.load(tmp_path, manifest) is None
    made = Measured("cut", {"pause_s": 8.5}, [Bar("continues", "8.5 s", met=True)])
    made.save(tmp_path, manifest)
    assert Measured.load(tmp_path, manifest) == made
    other = {"spec": {"network": {"exposure": "NodePort"}}}
    assert Measured.load(tmp_path, other) is None


def test_documents_of_a_watch_are_separated_by_their_lines() -> None:
    from status_watch import _documents

    text = '{\n    "status": {\n        "links": {}\n    }\n}\n{\n    "status": {}\n}\n{\n    "st'
    found = list(_documents(iter(text.splitlines(keepends=True))))
    assert found == [{"status": {"links": {}}}, {"status": {}}]

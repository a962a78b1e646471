"""Tests of benchmarks/paper: `dlion compare` accepts every manifest, column and environment.

The bars are judged as stated, and the pages come from the records. No test here trains;
tests/simulated/test_paper.py does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlion_environments.loading import load_environment
from dlion_environments.model import Environment
from dlion_worker.training.programs.builtin import cipher, cnn17, mobilenet

PAPER = Path(__file__).resolve().parents[2] / "benchmarks" / "paper"
SECONDS = 600.0
Command = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PAPER))
    import bars

    return bars


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PAPER))
    import published

    return published


@pytest.fixture
def command(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Call run.py with these arguments; return its exit code and its printed lines.

    It runs in this process, because another one would load TensorFlow again.
    """
    assert published
    import run

    def called(*words: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        code: int = run.main()
        return code, capsys.readouterr().out.splitlines()

    return called


@pytest.fixture
def records(published: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Records in a folder of the test."""
    assert published
    import records

    monkeypatch.setattr(records, "FIGURES", tmp_path)
    return records


def row(environment: str, variant: str, **medians: float | None) -> dict[str, Any]:
    names = ("time_to_target_s", "samples_to_target", "bytes_to_target", "accuracy", "sent_bytes",
             "samples")  # fmt: skip
    spreads = {name: {"median": medians.get(name)} for name in names}
    run = {"samples": medians.get("samples"), "received_bytes": [medians.get("into", 0.0)]}
    return {"environment": environment, "variant": variant, "runs": [run], **spreads}


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows), "seconds": SECONDS, "targetAccuracy": 0.5}


def judged(
    bars: ModuleType, published: ModuleType, *changed: Any, **documents: Any
) -> dict[str, Any]:
    """Verdicts by their subject; `changed` comparisons replace the published ones of that name."""
    named = {one.name: one for one in (*published.comparisons(), *changed)}
    results = {
        name.replace("_", "-"): (named[name.replace("_", "-")], own)
        for name, own in documents.items()
    }
    return {one.what: one for one in bars.verdicts(results)}


def test_a_bar_of_a_point_is_not_missed_by_rounding(
    bars: ModuleType, published: ModuleType
) -> None:
    def growing(accuracy: float) -> Any:
        rows = [("dlion", accuracy), ("without growing batch", 0.532667)]
        made = document(*(row("homo-a", name, accuracy=value) for name, value in rows))
        found = judged(bars, published, growing_batch=made)
        return found["growing over fixed batch, points, with the other techniques"].met

    assert [growing(accuracy) for accuracy in (0.522667, 0.522666)] == [True, False]


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A folder in which every file of data exists and is empty, also decoded in `out/data`."""
    for folder, suffix in ((tmp_path / "data", "tfrecord"), (tmp_path / "out" / "data", "npz")):
        for name in ("cifar10", "mnist"):
            (folder / name).mkdir(parents=True)
            for part in ("train", "test"):
                (folder / name / f"{part}.{suffix}").touch()
    return str(tmp_path / "data")


def test_all_parts_are_valid(
    data: str, tmp_path: Path, published: ModuleType, command: Command
) -> None:
    code, lines = command("--data", data, "--check", "--out", str(tmp_path / "out"))
    assert code == 0
    assert len(lines) == len(published.comparisons())
    assert all("all is well" in line for line in lines)


def test_the_reduced_edition_is_valid_and_scales_every_link_with_its_network(
    data: str, tmp_path: Path, published: ModuleType, command: Command
) -> None:
    import reduced_edition
    from comparison import environment

    code, lines = command("--data", data, "--reduced", "--check", "--out", str(tmp_path / "out"))
    assert code == 0
    assert len(lines) == len(published.comparisons())
    assert all("all is well" in line for line in lines)
    reduction = reduced_edition.Reduction(tmp_path)
    named = {one.name: one for one in published.comparisons()}
    colour, grey = (32, 32, 3), (28, 28, 1)
    for one, network, shape in (
        (named["systems"], cipher, colour),
        (named["slides"], cnn17, colour),
        (named["gpu"], mobilenet, colour),
        (named["adacomp-5"], cipher, grey),
    ):
        small = reduction.of(one)
        stands_in = reduced_edition.NETWORKS[one.file].parameters
        factor = stands_in / network(shape, 10).count_params()
        for name, place in zip(one.environments, small.environments, strict=True):
            was, now = load_environment(environment(name)), load_environment(place)
            assert [machine.cores for machine in now.workers] == [m.cores for m in was.workers]
            assert now.samples_per_s_per_core == was.samples_per_s_per_core
            assert rates(now) == pytest.approx([factor * rate for rate in rates(was)], rel=1e-5)
    assert reduction.of(named["wrong-labels"]) == named["wrong-labels"], (
        "this network is small at full size"
    )


@pytest.mark.parametrize("manifest", ["CIFAR10", "SLIDES", "MNIST"])
def test_links_are_scaled_by_the_size_of_the_reduced_network(
    published: ModuleType, manifest: str
) -> None:
    import importlib.util

    import reduced_edition

    network = reduced_edition.NETWORKS[getattr(published, manifest)]
    spec = importlib.util.spec_from_file_location("reduced_network", network.program)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    size = program.build_model().count_params()
    assert size == network.parameters == program.PARAMETERS


def rates(environment: Environment) -> list[float]:
    """The rates of all its links, in the order of the file."""
    reaches = [one for one in (environment.inside_sites, environment.between_sites) if one]
    both = [one.mbit_per_s for one in (*environment.workers, *reaches)]
    return [rate for rate in both if rate is not None]


def test_all_published_environments_and_systems_exist(published: ModuleType) -> None:
    systems, slides = published.comparisons()[:2]
    assert set(systems.environments) == {
        "homo-a", "homo-b", "hetero-cpu-a", "hetero-net-a", "hetero-sys-a", "hetero-sys-b",
        "dynamic-sys-a", "intercontinental",
    }  # fmt: skip
    assert set(slides.environments) == {"three-low-one-high", "two-clouds", "two-clouds-hetero"}
    assert slides.seconds == 30 * 60
    for one in (systems, slides):
        for name in ("full", "ako", "gaia", "hop"):
            assert "batching.policy=even" in one.columns[name]
            assert "batching.policy=weighted" in one.columns[f"{name}, weighted"]


def test_a_column_with_late_gradients_has_no_momentum_and_higher_rates(
    published: ModuleType,
) -> None:
    for comparison in published.comparisons()[:2]:
        assert set(comparison.grids) == {*comparison.columns, "ideal"}
        for name, settings in comparison.columns.items():
            late = "=asynchronous" in settings
            assert late == ("trainer.optimizer.momentum=0" in settings), name
            rates = published.RATES_WITHOUT_MOMENTUM if late else published.RATES
            assert comparison.grids[name] == rates


def test_a_speed_up_is_relative_to_the_fastest_published_system(
    bars: ModuleType, published: ModuleType
) -> None:
    times = {"dlion": 50.0, "dlion-published": 40.0, "full": 100.0, "ako": 80.0, "hop": 300.0}
    rows = [row("homo-b", name, time_to_target_s=time_s) for name, time_s in times.items()]
    rows.append(row("homo-b", "gaia"))  # the goal is not reached
    rows.append(row("homo-b", "full, weighted", time_to_target_s=1.0))
    found = judged(bars, published, systems=document(*rows))
    best = found["largest speed-up of dlion, either form, over the best"]
    assert (best.value, best.met, best.at_least) == (2.0, True, False)
    gaia = found["largest speed-up of dlion, either form, over gaia"]
    assert (gaia.value, gaia.at_least) == (SECONDS / 40, True)


def test_a_speed_up_below_the_bar_is_judged_once_all_environments_exist(
    bars: ModuleType, published: ModuleType
) -> None:
    times = {"dlion": 60.0, "dlion-published": 90.0, "full": 130.0, "ako": 80.0, "gaia": 100.0}
    times["hop"] = 100.0

    def rows(*places: str) -> list[dict[str, Any]]:
        return [
            row(place, name, time_to_target_s=s) for place in places for name, s in times.items()
        ]

    few = judged(bars, published, systems=document(*rows("homo-a", "homo-b")))
    full, ako = (
        few[f"largest speed-up of dlion, either form, over {one}"] for one in ("full", "ako")
    )
    assert (full.met, full.why) == (True, "")
    assert (ako.met, ako.why) == (None, "2 of 8 places")
    every = judged(bars, published, systems=document(*rows(*published.PUBLISHED)))
    assert every["largest speed-up of dlion, either form, over ako"].met is False


@pytest.mark.parametrize(("time_s", "met"), [(40.0, True), (60.0, False), (None, False)])
def test_adaptive_is_compared_with_the_ideal_and_misses_a_goal_it_does_not_reach(
    bars: ModuleType, published: ModuleType, time_s: float | None, met: bool
) -> None:
    columns = published.comparisons()[0].columns
    rows = [row("hetero-sys-a", name, time_to_target_s=50.0) for name in columns]
    rows = [one for one in rows if one["variant"] != "adaptive"]
    rows.append(row("hetero-sys-a", "adaptive", time_to_target_s=time_s))
    rows.append(row("hetero-sys-a", "ideal", time_to_target_s=30.0))
    found = judged(bars, published, systems=document(*rows))
    assert found["hetero-sys-a: adaptive, part of the ideal's speed"].met is met
    assert found["hetero-sys-a: adaptive over the soonest of all others"].met is met


@pytest.mark.parametrize(("samples", "met"), [(1300.0, True), (1301.0, False)])
def test_the_samples_of_adaptive_are_compared_with_those_of_the_ideal(
    bars: ModuleType, published: ModuleType, samples: float, met: bool
) -> None:
    rows = [
        row("two-clouds", name, time_to_target_s=30.0, samples_to_target=count)
        for name, count in (("adaptive", samples), ("ideal", 1000.0))
    ]
    found = judged(bars, published, slides=document(*rows))
    assert found["two-clouds: adaptive, samples to the target over the ideal's"].met is met


def test_without_an_ideal_no_part_of_its_speed_is_required(
    bars: ModuleType, published: ModuleType
) -> None:
    rows = document(row("two-clouds", "adaptive", time_to_target_s=30.0))
    assert not [what for what in judged(bars, published, recent_slides=rows) if "ideal" in what]


def test_records_are_read_again(published: ModuleType, records: ModuleType) -> None:
    piece = a_piece(published, records)
    records.record("", piece)
    assert records.recorded("", piece.comparison) == piece
    assert records.recorded("reduced", piece.comparison) is None


@pytest.mark.parametrize(
    "change", [{"seconds": 599}, {"settings": ("trainer.optimizer.momentum=0",)}, {"target": 0.1}]
)
def test_records_with_other_settings_are_not_used(
    published: ModuleType, records: ModuleType, change: dict[str, Any]
) -> None:
    piece = a_piece(published, records)
    records.record("", piece)
    assert records.recorded("", replace(piece.comparison, **change)) is None


def test_records_of_another_network_are_not_used(
    published: ModuleType, records: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "network.py").write_text("one = 1\n")
    (tmp_path / "job.yaml").write_text("program: {file: network.py}\n")
    piece = a_piece(published, records)
    piece = replace(piece, comparison=replace(piece.comparison, file=tmp_path / "job.yaml"))
    records.record("", piece)
    assert records.recorded("", piece.comparison) == piece
    (tmp_path / "network.py").write_text("one = 2\n")
    assert records.recorded("", piece.comparison) is None


def test_every_record_matches_the_present_settings(
    published: ModuleType, records: ModuleType, tmp_path: Path
) -> None:
    import reduced_edition

    kept = set((PAPER / "figures").rglob("*.jsonl"))
    reduction = reduced_edition.Reduction(tmp_path)
    asked = [
        replace(whole, environments=(place,))
        for whole in map(reduction.of, published.comparisons())
        for place in whole.environments
    ]
    records.FIGURES = PAPER / "figures"  # the fixture restores it
    taken = {records._path("reduced", one) for one in asked if records.recorded("reduced", one)}
    assert kept == taken


def a_piece(published: ModuleType, records: ModuleType) -> Any:
    """Two columns of two seeds in one environment."""
    from dlion_results.comparison import VariantRow, VariantRun, diverged

    systems = published.comparisons()[0]
    one = VariantRun(1, 12.5, None, 0.25, 0.5, 0.75, 0.125, 1e9, 0.5, 7, (1.0, 2.0), (None, 0.25))
    rows = tuple(VariantRow("homo-a", name, 0.05, (one, diverged(2))) for name in ("dlion", "gaia"))
    comparison = replace(systems, environments=("homo-a",))
    return records.Piece(comparison, rows, "0123456789ab", 2)


@pytest.mark.parametrize(
    ("edition", "name"),
    [
        ("full", "paper"),
        pytest.param("reduced", "paper-reduced", marks=pytest.mark.slow),
    ],
)
def test_the_page_is_made_from_the_records(
    edition: str, name: str, tmp_path: Path, command: Command
) -> None:
    page = PAPER.parents[1] / "docs" / f"{name}.md"
    assert page.exists() == (PAPER / "figures" / edition).exists()
    words = ["--remake", "--page", str(tmp_path), "--out", str(tmp_path)]
    words += ["--reduced"] * (edition == "reduced")
    code, _ = command(*words)
    assert code in (0, 1)  # 1: a bar is missed
    if page.exists():
        assert (tmp_path / page.name).read_text() == page.read_text()
        for picture in (tmp_path / "images").iterdir():
            assert (page.parent / "images" / picture.name).exists()


def test_a_missed_bar_is_missed_and_a_missing_figure_is_not_judged(
    bars: ModuleType, published: ModuleType
) -> None:
    rows = [
        row("delay-6", "plain", accuracy=0.61),
        row("delay-6", "compensated 0.04", accuracy=0.60),
    ]
    (missed,) = judged(bars, published, delay_5=document(*rows)).values()
    assert missed.met is False
    (unknown,) = judged(bars, published, delay_5=document(rows[0])).values()
    assert unknown.met is None


def test_bytes_into_the_server_are_compared_with_async_per_sample(
    bars: ModuleType, published: ModuleType
) -> None:
    rows = [
        row("mnist-5", "async", accuracy=0.97, samples=1000.0, into=1e9),
        row("mnist-5", "adacomp float32", accuracy=0.968, samples=2000.0, into=2.5e7),
        row("mnist-5", "adacomp float16, coded", accuracy=0.96, samples=1000.0, into=1e7),
    ]
    found = judged(bars, published, adacomp_5=document(*rows))
    flat = found["mnist-5: async / adacomp float32, bytes in"]
    assert flat.value == pytest.approx(80)
    assert flat.met
    assert found["mnist-5: adacomp float32 over async, points"].met
    assert found["mnist-5: async / adacomp float16, coded, bytes in"].met
    assert not found["mnist-5: adacomp float16, coded over async, points"].met


def test_the_median_is_compared_with_the_loss_of_the_mean(
    bars: ModuleType, published: ModuleType
) -> None:
    accuracies = {
        "mean, right": 0.98, "mean, wrong": 0.90, "median, right": 0.97, "median, wrong": 0.96,
    }  # fmt: skip
    rows = [row("intercontinental", name, accuracy=value) for name, value in accuracies.items()]
    (one,) = judged(bars, published, wrong_labels=document(*rows)).values()
    assert one.value == pytest.approx(7)
    assert one.met


def test_the_estimate_grows_with_seeds_time_and_messages(
    bars: ModuleType, published: ModuleType
) -> None:
    import estimate

    cost = estimate.Cost(sample_s=1e-3, start_s=0.0)
    few, _, many = (one for one in published.comparisons() if one.part == "selective")
    seconds = {
        (one.workers, seeds): estimate.core_seconds(one, cost, seeds=seeds, scale=1.0)
        for one in (few, many)
        for seeds in (1, 5)
    }
    # Two columns, and three rates for each with three seeds.
    assert seconds[6, 5] / seconds[6, 1] == pytest.approx((2 * 5 + 18) / (2 + 18))
    # The same samples, but thirty times as many messages for each.
    assert seconds[96, 1] > 2 * seconds[6, 1]
    delays = [one for one in published.comparisons() if one.part == "delays"]
    first, *_, last = (estimate.core_seconds(one, cost, seeds=1, scale=1.0) for one in delays)
    # To a server and back, however many workers there are; but more of them are judged.
    assert first < last < 2 * first

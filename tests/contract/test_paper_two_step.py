"""Tests of part `two-step` of benchmarks/paper: its environments, records, bars and curve.

test_paper_comparisons.py has the tests of all parts. No test here trains.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlion_api.errors import DLionError
from dlion_environments.loading import load_environment

PAPER = Path(__file__).resolve().parents[2] / "benchmarks" / "paper"
SECONDS = 500.0
EVERY = (1, 2, 4, 8)


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The modules of benchmarks/paper; records are in a folder of the test."""
    monkeypatch.syspath_prepend(str(PAPER))
    import bars
    import comparison
    import published
    import records
    import run
    import scaling_page

    monkeypatch.setattr(records, "FIGURES", tmp_path / "figures")
    return SimpleNamespace(
        bars=bars, comparison=comparison, published=published, records=records, run=run,
        scaling_page=scaling_page,
    )  # fmt: skip


@pytest.fixture
def environments(paper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the part's environments, which replaces them."""
    folder = tmp_path / "environments"
    folder.mkdir()
    for file in sorted((PAPER / "environments").glob("edge-*.yaml")):
        (folder / file.name).write_text(file.read_text())
    monkeypatch.setattr(paper.comparison, "ENVIRONMENTS", folder)
    return folder


def parts(paper: Any) -> dict[int, Any]:
    """The comparisons of the part by workers."""
    return {one.workers: one for one in paper.published.comparisons() if one.part == "two-step"}


def test_each_comparison_has_the_workers_and_the_batch_of_its_environment(paper: Any) -> None:
    found = parts(paper)
    assert tuple(found) == EVERY
    links = set()
    for n, one in found.items():
        (place,) = one.environments
        made = load_environment(paper.comparison.environment(place))
        (machine,) = made.workers
        assert made.inside_sites is not None
        assert (machine.count, machine.cores) == (n, 1)
        assert f"sites[0].groups[0].workers={n}" in one.settings
        assert f"batching.globalBatchSize.initial={one.batch}" in one.settings
        assert (one.batch, one.seconds) == (10 * n, 4000 // n)
        links.add((machine.mbit_per_s, made.inside_sites.latency_ms))
    assert links == {(50, 39)}, "the curve is of workers, not of links"


def test_an_environment_with_other_workers_is_refused(
    paper: Any, environments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> int:
        result: int = paper.run.main()
        return result

    for folder, suffix in ((tmp_path / "data", "tfrecord"), (tmp_path / "out" / "data", "npz")):
        (folder / "mnist").mkdir(parents=True)
        for part in ("train", "test"):
            (folder / "mnist" / f"{part}.{suffix}").touch()
    words = ["--data", str(tmp_path / "data"), "--only", "two-step", "--check"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--out", str(tmp_path / "out")])
    assert check() == 0
    file = environments / "edge-8.yaml"
    file.write_text(file.read_text().replace("count: 8", "count: 7"))
    with pytest.raises(DLionError, match="7"):
        check()


def test_a_record_on_other_links_is_not_used(paper: Any, environments: Path) -> None:
    from dlion_results.comparison import VariantRow, diverged

    one = parts(paper)[4]
    rows = (VariantRow("edge-4", "twostep", 0.05, (diverged(1),)),)
    paper.records.record("", paper.records.Piece(one, rows, "0123456789ab", 1))
    assert paper.records.recorded("", one).rows == rows
    assert paper.records.recorded("", replace(one, batch=80)) is None
    file = environments / "edge-4.yaml"
    file.write_text(file.read_text().replace("latencyMs: 39", "latencyMs: 38"))
    assert paper.records.recorded("", one) is None


def results(paper: Any, times: dict[str, dict[int, float | None]]) -> dict[str, Any]:
    """Results with these times to the target; a gradient of 400 kB, 100 iterations each."""
    return {
        one.name: (
            one,
            {
                "seconds": SECONDS,
                "targetAccuracy": 0.9,
                "rows": [
                    {
                        "environment": f"edge-{n}",
                        "variant": name,
                        "time_to_target_s": {"median": by_n[n]},
                        "sent_bytes": {"median": 100 * n * (n - 1) * 4e5},
                        "samples": {"median": 100.0 * 10 * n},
                    }
                    for name, by_n in times.items()
                    if n in by_n
                ],
            },
        )
        for n, one in parts(paper).items()
        if any(n in by_n for by_n in times.values())
    }


def judged(paper: Any, times: dict[str, dict[int, float | None]]) -> dict[str, Any]:
    return {one.what: one for one in paper.bars.verdicts(results(paper, times))}


TIMES: dict[str, dict[int, float | None]] = {
    "ideal": {1: 400, 4: 100},
    "full": {1: 400, 4: 320},
    "twostep": {1: 400, 4: 140},
}


def test_the_speed_up_is_that_over_the_columns_own_single_worker(paper: Any) -> None:
    found = judged(paper, TIMES)
    scaling = found["edge-4: twostep, speed-up over one worker / workers"]
    assert scaling.value == pytest.approx(400 / 140 / 4)
    assert scaling.met
    slower = judged(paper, {**TIMES, "twostep": {1: 400, 4: 160}})
    assert slower["edge-4: twostep, speed-up over one worker / workers"].met is False
    lines = paper.scaling_page.curve_table(results(paper, TIMES))
    assert "| twostep: speed-up | 1.00 | 2.86 |" in lines
    assert "| full: speed-up | 1.00 | 1.25 |" in lines


def test_a_ring_all_reduce_takes_2n_minus_2_transfers_in_each_iteration_of_the_ideal(
    paper: Any,
) -> None:
    # A second of compute, then six transfers of 100 kB at 50 Mbit/s, 39 ms away.
    ring_s = 100 * (1 + 6 * (0.039 + 0.016))
    one = judged(paper, TIMES)["edge-4: twostep over ring all-reduce"]
    assert (one.value, one.met) == (pytest.approx(ring_s / 140), False)
    lines = paper.scaling_page.curve_table(results(paper, TIMES))
    assert f"| ring all-reduce, computed: seconds | 400 | {ring_s:.0f} |" in lines


def test_a_target_that_is_never_reached_misses_every_bar(paper: Any) -> None:
    found = judged(paper, {**TIMES, "twostep": {1: 400, 4: None}})
    assert len(found) == 3
    assert {one.met for one in found.values()} == {False}
    full = judged(paper, {**TIMES, "full": {1: 400, 4: None}})["edge-4: twostep over full"]
    assert (full.value, full.met, full.at_least) == (SECONDS / 140, True, True)


def test_nothing_is_judged_that_did_not_run(paper: Any) -> None:
    found = judged(paper, {"ideal": {4: 100.0}, "full": {4: 320.0}, "twostep": {4: 140.0}})
    assert found["edge-4: twostep, speed-up over one worker / workers"].met is None
    assert found["edge-4: twostep over full"].met


def test_the_curve_is_drawn_with_a_missing_point(paper: Any, tmp_path: Path) -> None:
    from xml.etree import ElementTree

    out = tmp_path / "curve.svg"
    paper.scaling_page.write_curve(results(paper, {**TIMES, "full": {1: 400, 4: None}}), out)
    assert ElementTree.parse(out).getroot().tag.endswith("svg")

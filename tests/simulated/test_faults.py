"""Tests of whole simulated jobs with crashes, returns, latecomers, broken links and slow steps.

They use whole gradients in lock step, DLion's exchange under bounded staleness, Gaia, Hop and
`adaptive`. A crash costs the others at most what the design states. A worker that returns has a
peer's weights, whose bytes are counted. A silent peer is dropped. Sites that trained apart merge
once. Bounded staleness loses less to stragglers than lock step. Loss costs what the formula gives.
All of it repeats bit by bit.

Left out: the times of notifications (tests/unit/simulator); invalid files
(tests/unit/environments).
"""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.support.simulations import (
    DIGITS,
    Case,
    EndedCommand,
    Simulated,
    SimulatedCases,
    drift_over_time,
    four_workers,
    run_commands,
)

from dlion_api.exit_codes import ExitCode
from dlion_environments.plan import tcp_bytes_per_s

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SAMPLES = 80
"""Samples of all four workers in a step: 20 each, half a second at 40 samples/s."""
STEP_S, END_S = 0.5, 15.0

POLICIES: Mapping[str, dict[str, Any]] = {
    "full": {"exchange.policy": "full", "exchange.codec": "float32",
             "synchronization.mode": "synchronous"},
    "dlion": {"exchange.policy": "dlion", "synchronization": {"mode": "bounded"}},
    "gaia": {"exchange.policy": "gaia", "synchronization": {"mode": "bounded"}},
    "hop": {"exchange.policy": "hop", "synchronization": {"mode": "bounded"}},
    "adaptive": {"exchange.policy": "adaptive"},
}  # fmt: skip


def settings(policy: str, seconds: float = END_S, **more: Any) -> dict[str, Any]:
    return {
        "trainer.stop": {"maxSeconds": seconds},
        "trainer.evaluation.everySamples": 100_000,
        "batching.globalBatchSize": {"initial": SAMPLES, "growth": False},
        "knowledgeTransfer.policy": "none",
        **POLICIES[policy],
        **more,
    }


def absence(**times_s: float) -> dict[str, Any]:
    return {"worker": 1, **{name: {"seconds": at_s} for name, at_s in times_s.items()}}


CRASH_S, BACK_S = 4.0, 8.0
NARROW = {"mbitPerS": 1.2}
LATE_MS = 300
HALF_SENT_S = (5.4, 5.6, 5.8)
"""Times of which at least one falls where worker 1's step has reached its own site but not the
other, with 0.3 s of latency.
"""
CUT_S, HEALED_S, APART_END_S = 5.0, 35.0, 46.0
NOTICED_S = CUT_S + 8.0 + STEP_S
"""The silence on a link plus the current step."""
EVALUATED_OFTEN = {"trainer.evaluation.everySamples": 400}
FOR_LATE_GRADIENTS = {"trainer.optimizer.learningRate": 0.01}
"""With the example's rate and momentum, replicas without a barrier diverge. Their distance then is
random and depends on the machine.
"""
SPLIT = four_workers(
    changes=[
        {"at": {"seconds": CUT_S}, "cutSites": ["b"]},
        {"at": {"seconds": HEALED_S}, "cutSites": []},
    ]
)
"""Long enough that each side trains for more than the ten iterations that need no merge."""
ONE_LINK = four_workers(
    changes=[
        {"at": {"seconds": CUT_S}, "cutLinks": [{"workers": [0, 1]}]},
        {"at": {"seconds": HEALED_S}, "cutLinks": []},
    ]
)
STRAGGLING = four_workers(stragglers=[{"slowdown": 6, "chance": 0.25}])
LOSS_PERCENT, LATENCY_S = 2.0, 0.04


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Simulated]:
    back = four_workers(absences=[absence(leaves=CRASH_S, comes=BACK_S)])
    stays_away = four_workers(absences=[absence(leaves=CRASH_S)])
    cases = {
        "stays-away": Case(stays_away, settings("full")),
        **{f"back-{policy}": Case(back, settings(policy)) for policy in POLICIES},
        # It sets its own pace, whatever the manifest has for synchronization.
        "back-gaia-asked-to-wait": Case(
            back, settings("gaia", synchronization={"mode": "synchronous"})
        ),
        "late": Case(
            four_workers(absences=[absence(comes=8)]), settings("full", startDeadlineSeconds=5)
        ),
        "fail": Case(stays_away, settings("dlion", failurePolicy="Fail")),
        "caught-up": Case(
            {**back, "insideSites": NARROW, "betweenSites": NARROW},
            settings("dlion", 24, synchronization={"mode": "synchronous"}),
        ),
        "again": Case(back, settings("full"), ("--threads", "1")),
        **{
            f"half-sent-{at_s}": Case(
                four_workers(absences=[absence(leaves=at_s)], betweenSites={"latencyMs": LATE_MS}),
                settings("full", 8, **{"trainer.hashWeights": True}),
            )
            for at_s in HALF_SENT_S
        },
    }
    return SimulatedCases(tmp_path_factory.mktemp("comings"), cases)


@pytest.fixture(scope="module")
def troubles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Simulated]:
    between = {"latencyMs": LATENCY_S * 1000}
    lossy = four_workers(betweenSites={**between, "lossPercent": LOSS_PERCENT})
    cases = {
        **{
            f"split-{policy}": Case(SPLIT, settings(policy, APART_END_S, **EVALUATED_OFTEN))
            for policy in ("full", "dlion", "adaptive")
        },
        **{
            f"one-link-{policy}": Case(
                ONE_LINK, settings(policy, APART_END_S, **EVALUATED_OFTEN, **rate)
            )
            for policy, rate in (("full", {}), ("dlion", FOR_LATE_GRADIENTS))
        },
        **{f"slow-{policy}": Case(STRAGGLING, settings(policy)) for policy in ("full", "dlion")},
        "far": Case(four_workers(betweenSites=between), settings("full")),
        "lossy": Case(lossy, settings("full")),
    }
    return SimulatedCases(tmp_path_factory.mktemp("troubles"), cases)


def iterations(run: Simulated, rank: int = 0) -> list[int]:
    return [step["iteration"] for step in run.steps[rank]]


def test_a_crash_of_one_of_four_costs_the_others_at_most_an_iteration(
    runs: dict[str, Simulated],
) -> None:
    run = runs["stays-away"]
    assert [event["rank"] for event in run.events("WorkerLost")] == [1]
    for rank in (0, 2, 3):
        walls = [step["wall_s"] for step in run.steps[rank]]
        assert max(walls) <= 2 * statistics.median(walls)
        assert iterations(run, rank) == list(range(1, len(walls) + 1))
    assert max(step["time_s"] for step in run.steps[1]) <= CRASH_S
    last = [run.steps[rank][-1]["local_batch_size"] for rank in (0, 2, 3)]
    assert sum(last) == SAMPLES
    ending = run.summary["ending"]
    assert ending["stop_reason"] == f"maxSeconds {END_S:g} reached"
    assert (ending["reason"], ending["missing"]) == ("Partial", [1]), (
        "the model of this run lacks a worker"
    )
    assert not ending["succeeded"]
    assert run.exit_code == ExitCode.PARTIAL
    assert runs["late"].exit_code == ExitCode.OK


LESS_OFTEN = [pytest.param(policy, marks=pytest.mark.slow) for policy in ("gaia", "hop")]


@pytest.mark.parametrize("policy", ["full", "dlion", "adaptive", "gaia-asked-to-wait", *LESS_OFTEN])
def test_a_worker_that_returns_adopts_a_peers_weights_and_continues(
    runs: dict[str, Simulated], policy: str
) -> None:
    run = runs[f"back-{policy}"]
    (rejoined,) = run.events("WorkerRejoined")
    assert rejoined["rank"] == 1
    assert BACK_S <= rejoined["time_s"] <= BACK_S + 8 * STEP_S
    own = [step for step in run.steps[1] if step["incarnation"] == 2]
    assert own[0]["iteration"] > rejoined["iteration"] > CRASH_S / STEP_S
    assert own[-1]["time_s"] > END_S - 1
    assert abs(own[-1]["iteration"] - run.steps[0][-1]["iteration"]) <= 6
    # No worker waits longer for it than for an iteration or two.
    for rank in (0, 2, 3):
        assert max(step["wall_s"] for step in run.steps[rank]) <= 3 * STEP_S


def test_in_lock_step_all_replicas_are_equal_again_after_a_crash_and_with_a_latecomer(
    runs: dict[str, Simulated],
) -> None:
    for name in ("back-full", "late"):
        assert runs[name].summary["drift"]["max"] == 0.0, name
        for rank in (0, 2, 3):  # it makes its first step beside theirs
            walls = [step["wall_s"] for step in runs[name].steps[rank]]
            assert max(walls) <= 1.5 * statistics.median(walls), name
    late = runs["late"]
    assert late.steps[1][0]["time_s"] > 8
    assert late.steps[1][0]["iteration"] > 8
    assert late.steps[0][0]["time_s"] < 1


def test_a_step_that_reached_some_peers_before_a_crash_counts_everywhere(
    runs: dict[str, Simulated],
) -> None:
    half_sent = 0
    for at_s in HALF_SENT_S:
        run = runs[f"half-sent-{at_s}"]
        hashes = [{s["iteration"]: s["weights_hash"] for s in run.steps[r]} for r in (0, 2, 3)]
        assert hashes[0] == hashes[1] == hashes[2], at_s
        last = run.steps[1][-1]["iteration"]
        walls = {s["iteration"]: s["wall_s"] for s in run.steps[3]}
        half_sent += max(walls[at] for at in (last, last + 1, last + 2)) > 1.2  # it was forwarded
    assert half_sent


def test_no_worker_waits_while_the_state_of_a_latecomer_is_transferred(
    runs: dict[str, Simulated],
) -> None:
    """The transfer takes two iterations on these links. With equal replicas all workers wait for
    it.
    """
    run = runs["caught-up"]
    (rejoined,) = run.events("WorkerRejoined")
    own = [step for step in run.steps[1] if step["incarnation"] == 2]
    assert own[0]["iteration"] > rejoined["iteration"] + 2
    for rank in (0, 2, 3):
        walls = [step["wall_s"] for step in run.steps[rank]]
        assert max(walls) < 2 * statistics.median(walls)
    assert abs(own[-1]["iteration"] - run.steps[0][-1]["iteration"]) <= 1


def test_the_bytes_of_a_state_are_counted_on_its_link(runs: dict[str, Simulated]) -> None:
    """In lock step all peers send it the same gradients; one of them also sends its state."""
    run = runs["back-full"]
    gradient = run.sent_bytes(0, 2) / len(run.steps[0])
    assert len({run.sent_bytes(peer, 1) for peer in (0, 2, 3)}) == 1
    states = sorted(run.sent_bytes(peer, 1, "state_bytes") for peer in (0, 2, 3))
    # Weights and momentum, each of float32 like a gradient's entries.
    assert states == [0, 0, pytest.approx(2 * gradient, rel=0.01)]


def test_a_permanently_lost_worker_ends_a_job_that_must_fail_then(
    runs: dict[str, Simulated],
) -> None:
    run = runs["fail"]
    reason = "worker 1 is gone for good, and failurePolicy is Fail"
    ending = run.summary["ending"]
    assert (ending["stop_reason"], ending["message"]) == (reason, reason)
    assert ending["succeeded"] is False
    assert run.exit_code == ExitCode.UNAVAILABLE
    assert len(run.events("ModelSaved")) == 2, "the trained model is kept"
    assert CRASH_S <= run.summary["time_s"] < CRASH_S + 2 * STEP_S


def test_joins_and_losses_repeat_bit_by_bit(runs: dict[str, Simulated]) -> None:
    assert runs["again"].trace_hash == runs["back-full"].trace_hash


@pytest.mark.parametrize("policy", ["full", "dlion"])
def test_a_silent_peer_is_dropped_and_linked_again_after_the_cut(
    troubles: dict[str, Simulated], policy: str
) -> None:
    run = troubles[f"split-{policy}"]
    for rank in range(4):
        waits = [(step["waited_s"], step["time_s"]) for step in run.steps[rank]]
        longest_s, at_s = max(waits)
        assert 8.0 - 7 * STEP_S <= longest_s <= 8.0 + STEP_S
        assert NOTICED_S - 3 * STEP_S <= at_s <= NOTICED_S + 3 * STEP_S
        during = [step for step in run.steps[rank] if NOTICED_S < step["time_s"] < HEALED_S]
        assert len(during) >= 10, "both sides continue without each other"
    connected = [
        (record["time_s"], record["connected"])
        for record in run.records
        if record["kind"] == "link" and (record["rank"], record["peer"]) == (0, 3)
    ]
    apart_s, linked_s = NOTICED_S + 1, HEALED_S + 4
    assert {is_up for at_s, is_up in connected if apart_s < at_s < HEALED_S} == {False}
    assert {is_up for at_s, is_up in connected if at_s > linked_s} == {True}


@pytest.mark.parametrize("policy", ["full", "dlion", "adaptive"])
def test_sites_that_trained_apart_merge_once(troubles: dict[str, Simulated], policy: str) -> None:
    run = troubles[f"split-{policy}"]
    folds = run.events("FoldedTogether")
    assert sorted(fold["rank"] for fold in folds) == [0, 1, 2, 3]
    assert min(fold["time_s"] for fold in folds) > HEALED_S
    folded_s = max(fold["time_s"] for fold in folds)
    drifts = drift_over_time(run)
    apart = max(drift for at_s, drift in drifts if at_s < HEALED_S)
    together = [drift for at_s, drift in drifts if at_s > folded_s + 1]
    assert apart > 0.3
    assert max(together) < 0.2 * apart  # and stays there
    assert folded_s - HEALED_S < 10
    last = [run.steps[rank][-1]["iteration"] for rank in range(4)]
    assert max(last) - min(last) <= 6


@pytest.mark.parametrize(
    ("policy", "most", "left"),
    [("full", 0.25, 0.06), pytest.param("dlion", 0.4, 0.4, marks=pytest.mark.slow)],
)
def test_two_workers_with_a_cut_link_catch_up_once_it_is_restored(
    troubles: dict[str, Simulated], policy: str, most: float, left: float
) -> None:
    """Their moments lack the updates that each missed of the other, but lead to the
    same weights.
    """
    run = troubles[f"one-link-{policy}"]
    folds = run.events("FoldedTogether")
    assert sorted(fold["rank"] for fold in folds) == [0, 1]
    assert all("worker 2" in fold["message"] for fold in folds)
    folded_s = max(fold["time_s"] for fold in folds)
    assert HEALED_S < folded_s < HEALED_S + 10
    drifts = drift_over_time(run)
    apart = max(drift for at_s, drift in drifts if at_s < folded_s)
    together = [drift for at_s, drift in drifts if at_s > folded_s + 3]
    assert apart > 0.05
    assert len(together) > 1
    assert max(together) < most * apart
    assert together[-1] < left * apart
    if policy == "full":
        for rank in (2, 3):
            assert iterations(run, rank) == list(range(1, len(iterations(run, rank)) + 1))


def test_bounded_staleness_loses_less_to_stragglers_than_lock_step(
    troubles: dict[str, Simulated],
) -> None:
    def kept(policy: str) -> float:
        return len(troubles[f"slow-{policy}"].steps[0]) / (END_S / STEP_S)

    in_lock_step, bounded = kept("full"), kept("dlion")
    assert in_lock_step < 0.5
    assert bounded > 1.15 * in_lock_step


def test_loss_costs_what_the_formula_gives(troubles: dict[str, Simulated]) -> None:
    """A gradient of every iteration crosses, with the headers of its message."""
    lossy, far = troubles["lossy"], troubles["far"]
    gradient = far.sent_bytes(0, 3) / len(far.steps[0])
    cap = tcp_bytes_per_s(LOSS_PERCENT / 100, 2 * LATENCY_S)
    expected_s = STEP_S + (gradient + 128) / cap + LATENCY_S
    walls = [step["wall_s"] for step in lossy.steps[0][2:]]
    assert statistics.median(walls) == pytest.approx(expected_s, rel=0.05)
    assert statistics.median(walls) > 1.2 * statistics.median(
        [step["wall_s"] for step in far.steps[0][2:]]
    )


def test_if_all_workers_are_lost_the_simulation_ends_with_a_message(
    ended: dict[str, EndedCommand],
) -> None:
    assert ended["simulate"].exit_code == ExitCode.UNAVAILABLE
    assert "worker 3 is gone" in ended["simulate"].stderr


def test_a_real_run_refuses_settings_for_the_simulator_only(
    ended: dict[str, EndedCommand],
) -> None:
    assert ended["run"].exit_code == ExitCode.SPEC
    message = " ".join(ended["run"].stderr.split())
    assert "stragglers[0]: is for `dlion simulate` only" in message


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EndedCommand]:
    """Two commands that fail."""
    folder = tmp_path_factory.mktemp("ended")
    gone = [{"worker": rank, "leaves": {"seconds": 3}} for rank in range(4)]
    commands = {}
    for name, environment in (("simulate", four_workers(absences=gone)), ("run", STRAGGLING)):
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(environment))
        stop = f"trainer.stop={json.dumps({'maxSteps': 50})}"
        out = str(folder / name / "out")
        commands[name] = [name, str(DIGITS), "-e", str(path), "--set", stop, "--out", out]
    found = run_commands(folder, commands)
    assert not (folder / "run" / "out").exists()
    return found


def test_a_comparison_accepts_runs_that_lack_a_worker_and_reports_this(tmp_path: Path) -> None:
    """Every policy's model lacks it there; such a run is not repeated."""
    path = tmp_path / "environment.yaml"
    path.write_text(yaml.safe_dump(four_workers(absences=[absence(leaves=CRASH_S)])))
    command = [
        "compare", str(DIGITS), "-e", str(path), "--policies", "full", "--seeds", "1",
        "--seconds", "8", "--target-accuracy", "0.1", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    first, again = run_commands(tmp_path, {"first": command, "again": command}).values()
    assert first.exit_code == 0, first.stderr
    assert "(partial: its model lacks a worker)" in " ".join(
        first.stderr.split() + first.stdout.split()
    )
    (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    assert [one["partial"] for one in row["runs"]] == [True]
    assert again.exit_code == 0
    assert "1 of 1 runs already exist" in again.stderr + again.stdout

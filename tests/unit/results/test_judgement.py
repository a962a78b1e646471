"""Tests of the judgement of a run.

A run has succeeded if a stop rule was met and every saved model has every replica. Otherwise its
exit code and text state that it ended early, or what the model lacks.

Left out: real runs (tests/local/test_partial_ends.py); simulated ones (tests/simulated).
"""

from __future__ import annotations

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_results.run_folder.models import SiteModel
from dlion_results.summary.judgement import EndReason, judge_run

MET = "maxSteps 60 reached"


def model(site: str, *ranks: int) -> SiteModel:
    return SiteModel(site, f"models/{site}/model.keras", "averaged", 0.9, 0.9, ranks, (), 1)


def test_all_replicas_in_all_models_after_a_stop_rule_is_success() -> None:
    models = [model("a", 0, 1, 2), model("b", 0, 1, 2)]
    judged = judge_run(["worker 1: " + MET, MET], expected=range(3), models=models, iteration=60)
    assert (judged.exit_code, judged.missing, judged.message) == (ExitCode.OK, (), "")
    assert judged.stop_reason == MET, "the forwarding worker is not named"


def test_a_missing_replica_makes_the_run_partial_and_is_named() -> None:
    judged = judge_run(
        [MET],
        expected=range(3),
        models=[model("a", 2)],
        iteration=60,
        why={0: "ended with DIVERGED (75)"},
    )
    assert (judged.exit_code, judged.missing) == (ExitCode.PARTIAL, (0, 1))
    assert judged.message == (
        "the result is partial: the saved model lacks workers 0, 1 "
        "(worker 0 ended with DIVERGED (75))"
    )


def test_each_of_several_different_models_is_named() -> None:
    models = [model("a", 0, 1), model("b", 2)]
    judged = judge_run([MET], expected=range(3), models=models, iteration=60)
    assert (judged.exit_code, judged.missing) == (ExitCode.PARTIAL, (0, 1, 2))
    assert "that of a holds workers 0, 1; that of b holds worker 2" in judged.message


@pytest.mark.parametrize("models", [[], [model("a", 0, 1)]])
def test_without_a_stop_rule_the_run_ended_early(models: list[SiteModel]) -> None:
    judged = judge_run(["SIGTERM received"], expected=range(2), models=models, iteration=7)
    assert judged.exit_code is ExitCode.ENDED_EARLY
    assert "at iteration 7, before its stop rule was met: SIGTERM received" in judged.message


def test_without_a_model_the_run_has_not_succeeded() -> None:
    judged = judge_run([MET], expected=range(2), models=[], iteration=60)
    assert (judged.exit_code, judged.missing) == (ExitCode.PARTIAL, (0, 1))
    assert judge_run([], expected=[0], models=[], iteration=0).exit_code is ExitCode.ENDED_EARLY


@pytest.mark.parametrize("code", [code for code in ExitCode if code is not ExitCode.OK])
def test_no_other_exit_code_is_complete(code: ExitCode) -> None:
    assert EndReason.of(code) is not EndReason.COMPLETED

"""Test the plan of a comparison.

Learning rates are tried once for each policy, from its own grid. A diverged run is the worst and is
not repeated. All problems are reported together before any run.

Left out: real processes (tests/simulated).
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import yaml

from dlion_api.errors import SpecError
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.commands.local.compare import compare
from dlion_cli.comparison.comparison_matrix import Matrix, Variant, separate_families
from dlion_cli.comparison.comparison_request import ComparisonRequest, build_matrix
from dlion_cli.inputs.manifests import apply_set
from dlion_results.comparison import diverged

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.yaml"


def matrix(**more: object) -> Matrix:
    variants = (
        Variant("dlion", (), family="dlion"),
        Variant("even", ("batching.policy=even",), family="dlion"),
        Variant("ako", ("exchange.policy=ako",), family="ako"),
    )
    given = {
        "file": DIGITS,
        "variants": variants,
        "environments": ("homo-a", "homo-b"),
        "assignments": (),
        "seeds": (1, 2),
        "learning_rates": (0.1, 0.2),
        "target_accuracy": 0.5,
        "seconds": 100,
        **more,
    }
    return Matrix(**given)  # type: ignore[arg-type]


def tried(own: Matrix) -> list[tuple[str, str, float, int]]:
    return [
        (one.variant.name, one.environment, one.learning_rate, one.seed)
        for one in own.planned_runs()
        if one.is_tuning
    ]


def test_rates_are_tried_on_the_first_column_of_each_policy_from_its_own_grid() -> None:
    own = matrix(family_rates={"ako": (0.01, 0.02, 0.03)}, tuned_in="homo-b")
    assert tried(own) == [
        ("dlion", "homo-b", 0.1, 101),
        ("dlion", "homo-b", 0.2, 101),
        ("ako", "homo-b", 0.01, 101),
        ("ako", "homo-b", 0.02, 101),
        ("ako", "homo-b", 0.03, 101),
    ]
    assert own.run_count() == 5 + 3 * 2 * 2


def test_each_environment_chooses_its_rates_with_unreported_seeds() -> None:
    own = matrix(family_rates={"dlion": (0.05,)}, tuning_seeds=(101, 102))
    assert {(name, place) for name, place, *_ in tried(own)} == {
        ("ako", "homo-a"),
        ("ako", "homo-b"),
    }
    seeds = {one.seed for one in own.planned_runs() if not one.is_tuning}
    assert seeds.isdisjoint(seed for *_, seed in tried(own))
    (stop,) = {
        setting
        for one in own.planned_runs()
        if one.is_tuning
        for setting in one.settings(own)
        if setting.startswith("trainer.stop")
    }
    assert stop == "trainer.stop.targetAccuracy=0.5"


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (["spec.trainer.stop.maxEpochs=2"], {"maxEpochs": 2}),
        (["trainer.stop={maxEpochs: 2, maxSteps: 7}"], {"maxEpochs": 2, "maxSteps": 7}),
        (["trainer.stop.maxEpochs=2", "trainer.stop.maxEpochs="], {}),
        (["trainer.stop.maxEpochs=2", "trainer.stop={maxSeconds: 9}"], {}),
    ],
)
def test_all_columns_end_at_the_same_limits(limits: list[str], kept: dict[str, int]) -> None:
    manifest = yaml.safe_load(DIGITS.read_text())
    manifest["spec"]["trainer"]["stop"] = {"maxSteps": 9, "targetAccuracy": 0.5}
    request = ComparisonRequest(
        file=DIGITS,
        document=manifest,
        policies=("adaptive", "ideal"),
        variants=("even:batching.policy=even",),
        environments=("homo-a",),
        assignments=("trainer.seed=3", *limits),
        seeds=1,
        target_accuracy=0.5,
        seconds=60,
        rates=(),
        tuned_in=None,
        tuning_seeds=1,
        step_overhead_s=None,
        calibration=None,
    )
    own = build_matrix(request)
    for one in own.planned_runs():
        run = apply_set(manifest, one.settings(own))["spec"]["trainer"]
        assert run["stop"] == {"maxSeconds": 60, **kept}
        assert run["seed"] == 3


def test_a_diverged_run_has_no_other_figure() -> None:
    one = diverged(3)
    assert one.diverged
    assert one.seed == 3
    assert (one.time_to_target_s, one.accuracy, one.sent_bytes, one.curve) == (None, None, None, ())


def dry(*flags: str, out: Path) -> None:
    words = [str(DIGITS), "-e", "quickstart", "--target-accuracy", "0.5", "--seconds", "9"]
    words += [*flags, "--out", str(out), "--dry-run"]
    compare.main(words, prog_name="dlion compare", standalone_mode=False)


def test_a_dry_run_checks_everything_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    dry(
        "--policies", "adaptive,ako,ideal", "--variant", "even:batching.policy=even",
        "--learning-rates", "0.1,0.2", "--learning-rates", "ako:0.01,0.02,0.03",
        "--against", "adaptive", "--seeds", "2", out=out,
    )  # fmt: skip
    # Two for adaptive (and its variant), three for ako and two for ideal, with three seeds each;
    # then four columns.
    assert f"runs: {3 * (2 + 3 + 2) + 4 * 2}," in capsys.readouterr().out
    assert not out.exists()


def test_the_rate_of_a_named_column_is_chosen_separately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry(
        "--policies", "adaptive", "--variant", "even:batching.policy=even",
        "--variant", "small:trainer.evaluation.maxSamples=100",
        "--learning-rates", "0.1,0.2", "--learning-rates", "even:0.01,0.02,0.03",
        "--seeds", "2", "--tuning-seeds", "1", out=tmp_path / "out",
    )  # fmt: skip
    # Two for adaptive and its variant small, three for the column; then three columns.
    assert f"runs: {2 + 3 + 3 * 2}," in capsys.readouterr().out


def test_rates_with_equal_labels_have_different_folders() -> None:
    rates = (0.05, 1e-7, 100.0, 0.12345671, 0.12345672, 0.1 + 0.2, 0.3)
    folders = matrix(learning_rates=rates, seeds=(1,)).folders()
    assert len(set(folders)) == len(folders) == (3 + 2) * 2 * len(rates)
    assert {folder.parent.name for folder in folders} == {
        "lr-0.05", "lr-1e-07", "lr-100", "lr-0.12345671", "lr-0.12345672",
        "lr-0.30000000000000004", "lr-0.3",
    }  # fmt: skip


def test_runs_of_two_environments_never_share_a_folder(tmp_path: Path) -> None:
    """One of the environments serves only for trying learning rates."""
    own = tmp_path / "quickstart.yaml"
    own.write_text((DIGITS.parents[1] / "environments" / "quickstart.yaml").read_text())
    tuned_in = ("--tuned-in", str(own))
    dry(*tuned_in, out=tmp_path / "out")
    with pytest.raises(click.UsageError, match=r"the same folder, quickstart/adaptive: give them"):
        dry(*tuned_in, "--learning-rates", "0.1,0.2", out=tmp_path / "out")
    own = own.rename(tmp_path / "...yaml")
    with pytest.raises(SpecError, match=r"--tuned-in: is not a valid folder name.*given: \.\."):
        dry("--tuned-in", str(own), "--learning-rates", "0.1,0.2", out=tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (("-e", "quickstart"), "environment 'quickstart' is given 2 times"),
        (("--variant", "a:trainer.seed=1", "--variant", "a:trainer.seed=1"), "column 'a' is"),
    ],
)
def test_no_run_is_done_twice(tmp_path: Path, more: tuple[str, ...], refused: str) -> None:
    """Otherwise two processes would write into the same folder."""
    with pytest.raises(click.UsageError, match=refused):
        dry(*more, out=tmp_path / "out")


def test_rates_may_be_tried_under_another_spelling_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "places" / "plant.yaml"
    own.parent.mkdir()
    own.write_text((DIGITS.parents[1] / "environments" / "quickstart.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    words = ["-e", "places/plant.yaml", "--tuned-in", "./places/../places/plant.yaml"]
    dry(*words, "--learning-rates", "0.1,0.2", out=tmp_path / "out")


def test_only_columns_without_a_policy_have_their_own_rates() -> None:
    columns = (Variant("full", (), family="full"), Variant("even", ("a=1",), family="full"))
    both = separate_families(columns, ["full", "even"])
    assert [one.family for one in both] == ["full", "even"]
    assert separate_families(columns, ["full"]) == columns


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--policies", ""), "nothing to compare"),
        (("--against", "gaia"), "allowed: adaptive, full"),
        (
            ("--learning-rates", "ako:0.1,0.2"),
            "policies without other rates: adaptive, full",
        ),
        (("--learning-rates", "nonsense:0.1"), "for 'nonsense'; columns"),
        (("--learning-rates", "adaptive:0.1,-2"), "learningRate"),
        (("--learning-rates", ":0.1"), "before the colon"),
        (("--tuned-in", "homo-a"), "6 workers"),
        (("--calibration", "no/such/file.json"), "cannot be read"),
    ],
)
def test_an_impossible_comparison_is_refused(
    flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - click's, or ours by its words
        dry(*flags, out=tmp_path / "out")
    assert words in f"{raised.value}{getattr(raised.value, 'message', '')}"


def test_all_problems_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(DIGITS), "-e", "quickstart", "-e", "nowhere", "--policies", "nonsense"]
    words += ["--variant", "wrong:exchange.codec=morse", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.SPEC
    printed = capsys.readouterr().err
    assert "spec.trainer.stop.targetAccuracy: is not given. Give --target-accuracy" in printed
    assert "--policies: there is no exchange policy of that name here (given: nonsense)" in printed
    assert "topk, twostep, ideal" in printed
    assert "--variant wrong: spec.exchange.codec" in printed
    assert "there is no environment of that name (given: nowhere)" in printed


def test_a_problem_of_the_manifest_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", str(DIGITS), "-e", "quickstart", "--set", "exchange.codec=morse"]
    words += ["--variant", "even:batching.policy=even", "--out", str(tmp_path / "out")]
    assert main(words) == ExitCode.SPEC
    assert capsys.readouterr().err.count("spec.exchange.codec") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--target-accuracy", "nan"),
        ("--seconds", "inf"),
        ("--step-overhead", "nan"),
        ("--learning-rates", "0.1,nan"),
    ],
)
def test_a_number_that_is_not_finite_is_wrong_usage(
    option: str, value: str, tmp_path: Path
) -> None:
    words = ["compare", str(DIGITS), "-e", "quickstart", "--target-accuracy", "0.5"]
    assert main([*words, "--out", str(tmp_path), "--dry-run", option, value]) == ExitCode.USAGE


def test_a_dry_run_prints_its_plan_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry("--policies", "dlion,ideal", "--seeds", "2", "-o", "json", out=tmp_path / "out")
    assert json.loads(capsys.readouterr().out) == {
        "columns": ["dlion", "ideal"],
        "environments": ["quickstart"],
        "seeds": [1, 2],
        "targetAccuracy": 0.5,
        "seconds": 9.0,
        "runs": 4,
    }


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        (
            "trainer.dataset={path: 'of/{site}', format: npz}",
            ExitCode.DATA,
            "trainer.dataset.path: no such file or directory: {0}/of/plant-b",
        ),
        (
            "trainer.startFrom=model.keras",
            ExitCode.DATA,
            "trainer.startFrom: no such file or directory: {0}/model.keras",
        ),
        ("trainer.program={file: none.py}", ExitCode.PROGRAM, "no such file: "),
    ],
)
def test_a_dry_run_reports_missing_files(
    setting: str,
    code: ExitCode,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "of" / "plant-a").mkdir(parents=True)
    done = main(
        ["compare", str(DIGITS), "-e", "quickstart", "--target-accuracy", "0.5", "--dry-run",
         "--out", str(tmp_path / "out"), "--data-root", str(tmp_path), "--set", setting]
    )  # fmt: skip
    printed = capsys.readouterr().err
    assert done == code
    assert words.format(tmp_path) in printed
    assert "plant-a" not in printed


def test_the_help_defines_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--help"]) == ExitCode.OK
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "For an even number of seeds, the median is the lower of the two middle values" in printed
    )


def test_figures_survive_json() -> None:
    from dlion_results.comparison import VariantRow

    row = VariantRow("homo-b", "dlion", 0.1, (diverged(1), diverged(2)))
    document = json.loads(json.dumps(row.document()))
    assert document["accuracy"] == {"median": None, "least": None, "most": None, "missing": 2}

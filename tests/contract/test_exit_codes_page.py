"""Tests of docs/errors-and-exit-codes.md.

It has each exit code, its name and whether a restart can help, and each reason for the end of a
run. Each failure on the page has a test that makes it.

Left out: that those tests pass.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dlion_api.exit_codes import ExitCode
from dlion_results.summary.judgement import EndReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors-and-exit-codes.md").read_text(encoding="utf-8")

CASES = {
    (ExitCode.FAILED, "a defect"): (
        ("unit/cli/test_commands.py", "test_each_kind_of_error_has_its_exit_code"),
        ("local/test_restarts.py", "test_each_restart_is_reported_at_once"),
    ),
    (ExitCode.USAGE, "wrong flags"): (("unit/cli/test_commands.py", "test_wrong_usage"),),
    (ExitCode.SPEC, "the manifest or environment is wrong"): (
        ("unit/cli/test_commands.py", "test_validate_prints_every_problem_with_its_line"),
        (
            "unit/cli/test_commands.py",
            "test_validate_refuses_an_environment_that_is_not_alone_in_its_file",
        ),
    ),
    (ExitCode.DATA, "is missing or corrupt"): (
        ("local/test_bad_input.py", "test_missing_or_corrupt_data_is_reported"),
        ("unit/cli/test_commands.py", "test_validate_prints_json_for_every_document"),
    ),
    (ExitCode.PROGRAM, "raised, broke its protocol"): (
        ("local/test_bad_input.py", "test_a_failing_program_is_reported"),
        ("local/test_own_programs.py", "test_a_callback_that_fails_ends_the_run_with_its_line"),
        (
            "local/test_kept_logs.py",
            "test_the_traceback_of_a_failed_program_is_kept_after_its_pods",
        ),
    ),
    (ExitCode.PROGRAM, "or policy raised"): (
        (
            "unit/core/policies/test_plugins.py",
            "test_a_failure_names_the_policy_its_line_and_the_exception",
        ),
    ),
    (ExitCode.PROGRAM, "ended its process with exit code 0"): (
        ("local/test_bad_input.py", "test_a_program_that_ends_its_process_fails_the_run"),
    ),
    (ExitCode.UNAVAILABLE, "a peer or the coordinator is missing"): (
        (
            "unit/cli/test_exit_codes_of_answers.py",
            "test_a_refusal_ends_every_command_with_its_code",
        ),
        ("local/test_given_up.py", "test_a_failed_environment_ends_the_run_with_a_summary"),
    ),
    (ExitCode.UNAVAILABLE, "a helper process keeps failing"): (
        ("local/test_given_up.py", "test_a_sidecar_that_cannot_be_kept_running_ends_the_run"),
    ),
    (ExitCode.UNAVAILABLE, "another run uses the folder"): (
        (
            "unit/cli/test_comparison_folder.py",
            "test_a_second_comparison_in_the_folder_is_refused_and_the_first_continues",
        ),
        ("local/test_resume.py", "assert_refused"),
    ),
    (ExitCode.UNAVAILABLE, "a package is missing"): (
        (
            "unit/cli/test_commands.py",
            "test_a_command_without_its_extra_names_the_package_to_install",
        ),
    ),
    (ExitCode.UNAVAILABLE, "A check of `preflight` or `doctor` failed"): (
        ("unit/cli/test_preflight.py", "test_one_site_that_hangs_hides_no_other"),
    ),
    (ExitCode.UNAVAILABLE, "killed one counts as 69"): (
        (
            "unit/cli/test_child_processes.py",
            "test_a_killed_process_is_reported_with_its_signal",
        ),
    ),
    (ExitCode.MODEL_LOST, "the keeper did not get the model"): (
        ("local/test_keeper.py", "test_a_model_that_was_not_uploaded_is_lost"),
    ),
    (ExitCode.STORAGE, "a disk is full or not writable"): (
        (
            "local/test_bad_input.py",
            "test_a_run_continues_from_its_last_checkpoint_after_a_full_disk",
        ),
        ("local/test_bad_input.py", "test_a_model_that_cannot_be_saved_is_reported"),
    ),
    (ExitCode.DIVERGED, "no longer finite"): (
        ("local/test_bad_input.py", "test_a_failing_program_is_reported"),
    ),
    (ExitCode.RESTARTS, "`maxRestarts` is used up"): (
        (
            "local/test_pod_exit_codes.py",
            "test_a_trainer_that_crashes_too_often_exits_with_restarts",
        ),
    ),
    (ExitCode.DENIED, "no permission (403), refused credentials (401)"): (
        (
            "unit/cli/test_exit_codes_of_answers.py",
            "test_a_refusal_ends_every_command_with_its_code",
        ),
    ),
    (ExitCode.DENIED, "fields that others have set (409)"): (
        ("cluster/test_cli.py", "test_fields_of_other_managers_are_not_taken_over"),
    ),
    (ExitCode.ENDED_EARLY, "before `trainer.stop` was met"): (
        (
            "local/test_partial_ends.py",
            "test_a_run_whose_trainers_are_asked_to_end_has_ended_early",
        ),
    ),
    (ExitCode.PARTIAL, "lacks a replica"): (
        ("local/test_partial_ends.py", "test_a_model_of_one_of_three_workers_is_partial"),
    ),
    (ExitCode.DEADLINE, "`activeDeadlineSeconds` has passed"): (
        (
            "local/test_given_up.py",
            "test_a_run_over_its_deadline_fails_and_keeps_its_models",
        ),
    ),
    (ExitCode.DEADLINE, "has waited for its `--timeout`"): (
        ("unit/cli/test_describe.py", "test_wait_for_all_names_ends_at_the_time_limit"),
    ),
    (ExitCode.INTERRUPTED, "SIGINT, SIGTERM or SIGHUP, in any command"): (
        ("local/test_interrupts.py", "test_a_signal_ends_everything_within_five_seconds"),
        ("local/test_interrupts.py", "test_a_terminal_hang_up_ends_the_run"),
        (
            "unit/cli/test_interruption.py",
            "test_a_signal_during_the_import_of_a_command_ends_it_with_a_message",
        ),
    ),
    (ExitCode.INTERRUPTED, "`stop.continuous` job has succeeded"): (
        ("local/test_growing_data.py", "test_models_are_published_during_training"),
    ),
}
"""Tests that have each code, by texts of the page."""


def test_exactly_the_exit_codes_are_on_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (yes|no) \| (.+) \| (.*)\|$", PAGE, re.MULTILINE)
    documented = [(int(code), name, fatal) for code, name, fatal, _, _ in rows]
    assert documented == [
        (code.value, code.name, "yes" if code.fatal else "no") for code in ExitCode
    ]


def test_every_reason_for_the_end_of_a_run_is_on_the_page() -> None:
    cells = re.findall(r"^\| \d+ \| \w+ \| \w+ \| ([^:]+): ", PAGE, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert {each.value for each in EndReason} <= named


def test_every_failure_has_a_remedy() -> None:
    rows = re.findall(r"^\| (\d+) \| .+ \| (.*)\|$", PAGE, re.MULTILINE)
    assert [code for code, advice in rows if not advice.strip()] == [str(ExitCode.OK.value)]


def test_each_failure_on_the_page_has_a_test_that_makes_it() -> None:
    assert {code for code, _ in CASES} == set(ExitCode) - {ExitCode.OK}
    for code, words in CASES:
        (row,) = re.findall(rf"^\| {code.value} \| .*$", PAGE, re.MULTILINE)
        assert words in row or words in PAGE.rpartition("`dlion compare` ends")[2], words


@pytest.mark.parametrize(
    ("code", "file", "name"),
    [(code, *test) for (code, _), tests in CASES.items() for test in tests],
)
def test_the_named_tests_exist_and_have_the_code(code: ExitCode, file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    found = [
        each
        for each in ast.parse(text).body
        if isinstance(each, ast.FunctionDef) and each.name == name
    ]
    assert len(found) == 1, f"{file} has no {name}"
    source = ast.unparse(found[0])  # its parametrization included
    error = "|ProgramError" if code is ExitCode.PROGRAM else ""
    assert re.search(rf"ExitCode\.{code.name}\b|== \(?{code.value}\b{error}", source), name

"""Test the command line itself: its imports, its exit codes, `validate`, `explain` and `init`.

- These three commands need neither TensorFlow nor gRPC. Each kind of error has its documented exit
  code and is printed to stderr.
- `validate` prints all problems of all documents, environments among them, as text or JSON.
- `explain` knows policies, their parameters, and the status. A command without its extra names the
  package to install.
- `init` writes a valid manifest, which is the example.

Left out: `run` and `report`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlion_api.errors import DataError, ProgramError, SpecError, UnavailableError
from dlion_api.exit_codes import ExitCode
from dlion_cli.__main__ import main
from dlion_cli.command_line import COMMANDS
from dlion_cli.terminal.failures import exit_code_of, message_of
from dlion_results.run_folder.storage import storage_error

ROOT = Path(__file__).parents[3]
DIGITS = str(ROOT / "examples" / "digits.yaml")


def test_light_commands_load_no_heavy_packages() -> None:
    code = (
        "import sys; from dlion_cli.__main__ import main;"
        f"codes = [main(a) for a in (['--help'], ['validate', {DIGITS!r}], ['explain'])];"
        "heavy = {'tensorflow', 'grpc', 'numpy', 'keras', 'google.protobuf'} & set(sys.modules);"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["exchange.policy"], ["  gaia\n    Updates once they are significant.", "  dlion\n"]),
        (["exchange.parameters"], ["  ako: partitions, maxPartitions", "  full: none"]),
        (
            ["exchange.parameters", "--policy", "ako"],
            ["  partitions <integer> (default 0;", "Number of parts of a gradient"],
        ),
        (
            ["exchange.parameters.share", "--policy", "topk"],
            [
                "FIELD:   spec.exchange.parameters.share <number> (default 0.01;",
                "Share of the entries",
            ],
        ),
        (["status"], ["FIELD:   status <object>\n", "  conditions <list of object>"]),
        (["status.trainerStatus"], ["  progressPercentage <integer>"]),
        (["limits", "--kind", "dlionruntime"], ["KIND:    DLionRuntime", "  maxWorkers <integer>"]),
    ],
)
def test_explain_knows_policies_their_parameters_and_the_status(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 0
    out = capsys.readouterr().out
    for part in expected:
        assert part in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["exchange.parameters", "--policy", "akoo"], ExitCode.SPEC, "allowed: adacomp"),
        (["trainer", "--policy", "ako"], 2, "--policy is only for exchange.parameters"),
        (["limit", "--kind", "DLionRuntime"], ExitCode.SPEC, "Did you mean limits?"),
        (["exchange.parameters.share"], 2, "depends on the policy: give --policy NAME"),
        (["exchange.parameters.share", "--policy", "akoo"], ExitCode.SPEC, "allowed: adacomp"),
        (
            ["exchange.parameters.sahre", "--policy", "topk"],
            ExitCode.SPEC,
            "spec.exchange.parameters.sahre: there is no such field; allowed: share, residual.",
        ),
        (["status.trainer"], ExitCode.SPEC, "Did you mean trainerStatus?"),
        (["status.trainer"], ExitCode.SPEC, "status.trainer: there is no such field"),
        (["spec.maxSecond"], ExitCode.SPEC, "Did you mean spec.trainer.stop.maxSeconds?"),
        (["maxSteps"], ExitCode.SPEC, "Did you mean spec.trainer.stop.maxSteps?"),
        (["trainer.Stop"], ExitCode.SPEC, "Did you mean stop?"),
        (["status.megabitsPerSecond"], ExitCode.SPEC, "status.links.pairs.megabitsPerSecond?"),
        (["status.trainerStatus.reason"], ExitCode.SPEC, "Did you mean status.conditions.reason?"),
        (["stop.maxSteps"], ExitCode.SPEC, "Did you mean spec.trainer.stop.maxSteps?"),
        (["spec.trainer.stopx.maxSteps"], ExitCode.SPEC, "Did you mean stop?"),
        (["sites.groups.dataset"], ExitCode.SPEC, "Did you mean spec.trainer.dataset?"),
        (["metadatx"], ExitCode.SPEC, "Did you mean metadata?"),
    ],
)
def test_explain_refuses_unknown_fields(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_the_process_exits_without_finalizing_the_interpreter() -> None:
    """Handlers registered with atexit do not run; the output is complete."""
    code = (
        "import atexit, sys; atexit.register(print, 'taken down');"
        "from dlion_cli.__main__ import main;"
        "sys.argv = ['dlion', *sys.argv[1:]]; sys.exit(main())"
    )
    for words, exit_code in (
        (["validate", DIGITS], ExitCode.OK),
        (["explain", "x"], ExitCode.SPEC),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == exit_code
        assert "taken down" not in done.stdout
        assert ("is valid" in done.stdout) == (exit_code is ExitCode.OK)


EXTRAS = (
    "cryptography", "grpc", "jinja2", "keras", "kubernetes", "markupsafe", "matplotlib", "networkx",
    "numba", "numpy", "prometheus_client", "sklearn", "tensorflow", "urllib3", "websocket",
)  # fmt: skip
WORKER_EXTRA = ("jinja2", "keras", "matplotlib", "networkx", "numba", "numpy", "tensorflow")
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from dlion_cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["run", DIGITS], "worker"),
        (["simulate", DIGITS, "-e", "quickstart"], "worker"),
        (["compare", DIGITS, "-e", "quickstart", "--policies", "dlion,full"], "worker"),
        (["calibrate", DIGITS], "worker"),
        (["report", "nowhere"], "worker"),
        (["get"], "cluster"),
        (["top", "digits"], "cluster"),
    ],
)
def test_a_command_without_its_extra_names_the_package_to_install(
    words: list[str], extra: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(packages=EXTRAS), *words],
        check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert f"-py3-none-any.whl[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert "defect" not in done.stderr
    assert done.returncode == ExitCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["validate", DIGITS], EXTRAS),
        (["explain", "spec.exchange.parameters"], EXTRAS),
        (["completion", "bash"], EXTRAS),
        (["describe", "--help"], EXTRAS),
        (["submit", "--help"], WORKER_EXTRA),
        (["trust", "--help"], WORKER_EXTRA),
    ],
)
def test_a_command_needs_no_other_extra(
    words: list[str], missing: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(packages=missing), *words],
        check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == ExitCode.OK, done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError([]), ExitCode.SPEC),
        (DataError("x"), ExitCode.DATA),
        (ProgramError("x"), ExitCode.PROGRAM),
        (UnavailableError("x"), ExitCode.UNAVAILABLE),
        (OSError(28, "No space left on device"), ExitCode.STORAGE),
        (OSError(27, "File too large"), ExitCode.STORAGE),
        (OSError(5, "Input/output error"), ExitCode.STORAGE),
        (storage_error("cannot write", Path("x"), OSError(999, "news")), ExitCode.STORAGE),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (ZeroDivisionError(), ExitCode.FAILED),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_a_disk_error_behind_another_counts_as_storage() -> None:
    error = DataError("cannot write")
    error.__cause__ = OSError(28, "No space left on device")
    assert exit_code_of(error) is ExitCode.STORAGE


def test_a_disk_error_names_the_remedy() -> None:
    bare = message_of(OSError(28, "No space left on device"))
    assert bare.startswith("a file cannot be read or written: [Errno 28]")
    assert "Free some space" in bare
    named = message_of(OSError(30, "Read-only file system", "/readonly/out"))
    assert named.startswith("[Errno 30] Read-only file system: '/readonly/out'. Free some space")
    assert message_of(OSError(2, "No such file", "x")) == "[Errno 2] No such file: 'x'"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["calibrate", "--builtin", "nosuch"], ExitCode.USAGE, "'cipher', 'cnn17', 'digits'"),
        (["calibrate", "--out", "/proc/x.json"], ExitCode.STORAGE, "cannot write x.json"),
        (["report", "nowhere", "--picture", "a.png"], ExitCode.USAGE, "a.png: must be an SVG file"),
        (
            ["compare", DIGITS, "-e", "quickstart", "--seconds", "nan"],
            ExitCode.USAGE,
            "'--seconds': nan is not a finite number",
        ),
        (["run", DIGITS, "--certificate-life", "9" * 14], ExitCode.USAGE, "10<=x<=2147483647"),
        (["run", DIGITS, "--data-root", "/proc/x"], ExitCode.USAGE, "'/proc/x' does not exist"),
        (["init", "/proc/x"], ExitCode.STORAGE, "dlion: /proc/x: the template cannot be written"),
    ],
)
def test_an_impossible_command_is_refused_before_any_effect(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("arguments", [["nonsense"], ["validate"], ["explain", "--nonsense"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == ExitCode.USAGE
    assert capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_validate_prints_every_problem_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(DIGITS).read_text(encoding="utf-8")
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        text.replace("policy: weighted", "policy: Weighted").replace("seed: 1", "seeds: 1")
    )
    assert main(["validate", DIGITS, str(bad)]) == ExitCode.SPEC
    out, err = capsys.readouterr()
    assert f"{DIGITS}: DLionJob default/digits#1 is valid" in out
    seeds, policy = (
        1 + text[: text.index(word)].count("\n") for word in ("seed: 1", "policy: weighted")
    )
    assert "bad.yaml: 2 problems" in err
    assert f'line {seeds}: spec.trainer.seeds: there is no field "seeds" here' in err
    assert f"line {policy}: spec.batching.policy: is not an allowed value" in err
    assert "weighted. Did you mean weighted?" in err


def test_validate_prints_json_for_every_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = tmp_path / "two.yaml"
    two.write_text(f"{Path(DIGITS).read_text(encoding='utf-8')}\n---\nkind: DLionJob\n")
    assert main(["validate", "-o", "json", str(two), str(tmp_path / "none.yaml")]) == ExitCode.DATA
    good, bad, none = json.loads(capsys.readouterr().out)
    assert good["valid"]
    assert good["source"] == f"{two}#1"
    assert len(good["specHash"]) == 64
    assert {p["path"] for p in bad["problems"]} == {"apiVersion", "metadata", "spec"}
    assert none["exitCode"] == ExitCode.DATA


def test_validate_prints_each_result_before_it_checks_the_next_file() -> None:
    """The second file is standard input, which has no end yet."""
    with subprocess.Popen(
        [sys.executable, "-m", "dlion_cli", "validate", "--no-run", DIGITS, "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert "digits#1 is valid" in process.stdout.readline()
        process.communicate("")
    assert process.returncode == ExitCode.SPEC


def test_validate_accepts_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(str(path) for path in (ROOT / "environments").glob("*.yaml"))
    assert main(["validate", *files]) == 0
    assert capsys.readouterr().out.count("is valid") == len(files) >= 13
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nworkers:\n  - {cores: many}\ninsideSide: {mbitPerS: 1}\n")
    assert main(["validate", "-o", "json", str(bad)]) == ExitCode.SPEC
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["valid"]) == ("environment", False)
    assert {(one["path"], one["line"]) for one in report["problems"]} == {
        ("workers[0].cores", 3),
        ("insideSide", 4),
    }


def test_validate_checks_that_a_job_fits_an_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--no-run", DIGITS, "-e", "quickstart"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["validate", DIGITS, "-e", "homo-a", "-o", "json"]) == ExitCode.SPEC
    (result,) = json.loads(capsys.readouterr().out)
    assert result["job"] == "default/digits#1"
    (problem,) = result["problems"]
    assert problem["path"].startswith("environment homo-a: ")
    assert "6 workers" in problem["message"]
    assert main(["validate", DIGITS, "-e", "nowhere"]) == ExitCode.SPEC
    assert "there is no environment of that name (given: nowhere)" in capsys.readouterr().err


def test_validate_refuses_an_environment_that_is_not_alone_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both.yaml"
    both.write_text(
        f"{Path(DIGITS).read_text(encoding='utf-8')}\n---\nname: b\nworkers: [{{cores: 0}}]\n"
    )
    assert main(["validate", "-o", "json", str(both)]) == ExitCode.SPEC
    job, environment = json.loads(capsys.readouterr().out)
    assert job["valid"]
    messages = {one["path"]: one["message"] for one in environment["problems"]}
    assert "takes a file with one" in messages["(document)"]
    assert "workers[0].cores" in messages


def test_validate_states_for_which_runs_an_environment_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text(
        "name: mixed\nworkers: [{cores: 1}]\n"
        "changes: [{at: {seconds: 90}, cores: [2]}, {at: {fraction: 0.5}, cores: [1]}]\n"
    )
    assert main(["validate", str(mixed)]) == 0
    printed = capsys.readouterr().out
    assert "mixed is valid, only for a run of 180 s or longer (trainer.stop.maxSeconds)" in printed


def test_validate_reports_contradictions_within_an_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "name: bad\nworkers: [{count: 2, cores: 0}]\nchanges:\n"
        "  - {at: {seconds: 5}, cutSites: [zz]}\n  - {at: {seconds: 1}, cutWorkers: [9]}\n"
    )
    assert main(["validate", str(bad)]) == ExitCode.SPEC
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines[1:]] == [
        "workers[0].cores", "changes[0].cutSites", "changes[1].cutWorkers", "changes[1].at",
    ]  # fmt: skip


def test_validate_accepts_no_list_as_an_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "list.yaml"
    listed.write_text("- workers\n")
    assert main(["validate", str(listed)]) == ExitCode.SPEC
    assert "must be a mapping" in capsys.readouterr().err


def test_validate_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(DIGITS).read_bytes())))
    assert main(["validate", "-"]) == 0
    assert "standard input" in capsys.readouterr().out


def test_a_closed_standard_input_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a process that a service or `<&-` starts."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["validate", "-"]) == ExitCode.DATA
    assert "cannot be read: it is closed. Name a file" in capsys.readouterr().err


def test_no_name_of_a_manifest_controls_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text('kind: DLionJob\nspec: {"run\\e]0;x\\aId": 1, "sites\\nb": 2}\n')
    for command in (["validate", str(file)], ["render", str(file)]):
        assert main(command) == ExitCode.SPEC
        printed = capsys.readouterr().err
        assert "spec.run·]0;x·Id: there is no field" in printed
        assert all(line.isprintable() for line in printed.splitlines())


def test_explain_shows_a_field_and_all_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "knowledgeTransfer.lambda"]) == 0
    printed = capsys.readouterr().out
    assert "spec.knowledgeTransfer.lambda <number> (default 0.75; 0 to 1)" in printed
    assert main(["explain", "--recursive"]) == 0
    assert "      targetAccuracy <number>" in capsys.readouterr().out


def test_explain_of_an_unknown_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "trainer.optimiser"]) == ExitCode.SPEC
    assert "Did you mean optimizer?" in capsys.readouterr().err


@pytest.mark.parametrize("template", ["image", "digits"])
def test_the_file_that_init_writes_is_valid(
    template: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new one"
    assert main(["init", str(target), "--template", template]) == 0
    assert f"dlion validate '{target / 'job.yaml'}'\n" in capsys.readouterr().out
    assert main(["validate", str(target / "job.yaml")]) == 0
    assert main(["init", str(target), "--template", template]) == ExitCode.USAGE
    assert "--force" in capsys.readouterr().err


def test_the_example_equals_the_file_that_init_writes(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    for name in ("job.yaml", "program.py"):
        example = ROOT / "examples" / "own-model" / name
        assert example.read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["explain"], ["ls"], ["--help"]])
def test_a_command_whose_reader_closes_the_pipe_ends_as_by_its_signal(
    words: list[str], tmp_path: Path
) -> None:
    """As by `dlion explain | true`: scripts know this code of other commands."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "dlion_cli", *words], cwd=tmp_path,
            stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=300,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_a_failed_completion_has_its_own_code() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "dlion_cli"], env=os.environ | {"_DLION_COMPLETE": "other_source"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 1

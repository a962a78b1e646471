"""Test how the Python client builds manifests.

- A path, a mapping and a text give the same job. Fields set by path or by keyword are those that
  the reader of manifests finds.
- Every problem is raised before a folder or a process is created, with the errors of `dlion
  validate`.
- Programs, sites and workers make manifests. `import dlion` is quick and imports no large package.

Left out: the started commands (test_client_processes.py, tests/local/test_python_client.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import dlion
from dlion import errors, manifests
from dlion.arguments import check_program_name
from dlion_api.exit_codes import ExitCode
from dlion_api.spec import load_job
from dlion_cli.inputs.manifests import apply_set
from manifest_table import smallest

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("tensorflow", "keras", "grpc", "kubernetes", "pandas", "numpy", "numba", "matplotlib")


def test_importing_is_quick_and_imports_nothing_large() -> None:
    code = f"""
import sys, time
began_s = time.process_time()
import dlion
took_s = time.process_time() - began_s  # others share the cores
print(took_s, sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    took: list[float] = []
    for _ in range(3):
        answer = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        took_s, _, heavy = answer.strip().partition(" ")
        assert heavy == "[]"
        took.append(float(took_s))
    assert min(took) < 0.3, took


def test_a_cluster_is_chosen_without_tensorflow(tmp_path: Path) -> None:
    code = """
import sys, dlion
try:
    dlion.Client("kubernetes", kubeconfig="none")
except dlion.DLionError as error:
    print(error, sorted({"tensorflow", "grpc"} & set(sys.modules)))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "none" in process.stdout
    assert process.stdout.rstrip().endswith("[]")


def test_a_program_is_checked_without_tensorflow(tmp_path: Path) -> None:
    """Only a model in memory needs TensorFlow in the caller's process."""
    code = """
import sys, dlion
try:
    dlion.train("digits", stop={})
except dlion.DLionError as error:
    print(error, sorted({"tensorflow", "keras", "dlion.model_project"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "trainer.stop" in process.stdout
    assert process.stdout.rstrip().endswith("[]")


def test_the_three_forms_of_a_manifest_give_the_same_job(tmp_path: Path) -> None:
    document = smallest()
    document["spec"]["runId"] = "1e3"  # YAML reads this text as a number unless it is quoted
    file = tmp_path / "job.yaml"
    file.write_text(text := yaml.safe_dump(document) + "# end\n")
    file.write_text(text := text.replace("runId: 1e3", "runId: '1e3'"))
    forms: list[Any] = [str(file), file, document, text]
    read = [manifests.read_manifest(form) for form in forms]
    for each in read:
        assert load_job(each.document.value) == load_job(document)
    assert [each.file for each in read] == [file, file, Path("-"), Path("-")]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("", "cannot be read"),
        ("none.yaml", "none.yaml: cannot be read"),
        (Path("/"), "cannot be read"),
        ("-", "standard input"),
        ("a\0.yaml", r"\(file\): is not a path \(given: 'a\\x00.yaml'\)"),
        ("a: [\n", "is not YAML"),
        ("\n", "is empty"),
        ("a: 1\n---\nb: 2\n", "several documents"),
        ({"a": {"b": [1, object()]}}, r"a\.b\[1\]: cannot be in a manifest \(given: a object"),
        ({"a": float("nan")}, "apiVersion|is missing|required"),
        ({1: 2}, "apiVersion|unknown|missing"),
        ({"a": "\ud800"}, "apiVersion|unknown|missing"),
        ("x" * 5_000_000 + "\n", "too large"),
    ],
)
def test_an_invalid_manifest_is_refused(tmp_path: Path, manifest: Any, message: str) -> None:
    client = dlion.Client(root=tmp_path / "runs")
    with pytest.raises((errors.SpecError, errors.DataError), match=message):
        client.train(manifest)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("backend", ["local", "simulated"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.stop": {"maxSeconds": -1}}, "maxSeconds"),
        ({"trainer.stop.maxSeconds": 5, "suspend": True}, "is suspended"),
        ({"exchange.policy": "unheard-of"}, "exchange.policy"),
        ({"trainer.stop": {"a": object()}}, r"trainer\.stop\.a: cannot be in a manifest"),
        (["trainer"], "has no ="),
    ],
)
def test_a_wrong_field_is_raised_before_anything_starts(
    tmp_path: Path, backend: Any, changes: Any, message: str
) -> None:
    client = dlion.Client(backend, root=tmp_path / "runs")
    with pytest.raises(errors.SpecError, match=message):
        client.train(smallest(), set=changes, environment="quickstart")
    assert not (tmp_path / "runs").exists()


def test_all_problems_have_their_lines(tmp_path: Path) -> None:
    text = yaml.safe_dump(smallest()).replace("kind: DLionJob", "kind: Job") + "extra: 1\n"
    with pytest.raises(errors.SpecError) as caught:
        dlion.Client(root=tmp_path).train(text)
    problems = {problem.path: problem.line for problem in caught.value.problems}
    assert set(problems) == {"kind", "extra"}
    assert problems["extra"] == len(text.splitlines())


def test_missing_data_and_a_wrong_program_are_raised_before_anything_starts(tmp_path: Path) -> None:
    client = dlion.Client(root=tmp_path / "runs")
    missing = {"trainer.dataset": {"path": "none.npz", "format": "npz"}}
    with pytest.raises(errors.DataError, match=r"none\.npz"):
        client.train(smallest(), set=missing, data_root=tmp_path)
    (tmp_path / "program.py").write_text("def build_model(:\n")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(smallest()))
    for file, message in (("program.py", "is not Python"), ("none.py", "no such file")):
        with pytest.raises(errors.ProgramError, match=message):
            client.train(tmp_path / "job.yaml", set={"trainer.program": {"file": file}})
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("environment", "message"), [("unheard-of", "no environment"), ("none.yaml", "cannot be read")]
)
def test_a_wrong_environment_is_raised(tmp_path: Path, environment: str, message: str) -> None:
    for backend in ("local", "simulated"):
        with pytest.raises(errors.SpecError, match=message):
            dlion.Client(backend, root=tmp_path).train(smallest(), environment=environment)
    with pytest.raises(errors.SpecError, match="is needed in virtual time"):
        dlion.Client("simulated", root=tmp_path).train(smallest())
    assert not list(tmp_path.iterdir())


def test_a_simulation_without_an_end_is_refused(tmp_path: Path) -> None:
    stop = {"trainer.stop": {"targetAccuracy": 0.9}}
    with pytest.raises(errors.SpecError, match="always reached"):
        dlion.Client("simulated", root=tmp_path).train(
            smallest(), environment="quickstart", set=stop
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "docker"}, "allowed: local, simulated, kubernetes"),
        ({"backend": "local", "namespace": "ml"}, "namespace: is for backend kubernetes"),
        ({"backend": "simulated", "kubeconfig": "x"}, "kubeconfig: is for backend kubernetes"),
    ],
)
def test_arguments_of_another_back_end_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(errors.SpecError, match=message):
        dlion.Client(**arguments)


@pytest.mark.parametrize(
    "value",
    [
        20,
        1e-05,
        0.1,
        True,
        "2",
        "1e3",
        "yes",
        "null",
        "",
        "a: b # c",
        "ä\n\t\"'",
        [1, "2"],
        {"a": 1},
    ],
)
def test_a_set_value_arrives_unchanged(value: Any) -> None:
    (assignment,) = manifests.assignments_of({"trainer.seed": value})
    assert apply_set({}, [assignment]) == {"spec": {"trainer": {"seed": value}}}


def test_none_removes_a_field_and_texts_are_read_as_by_the_command() -> None:
    assert apply_set({"spec": {"a": 1}}, manifests.assignments_of({"a": None})) == {"spec": {}}
    assert manifests.assignments_of("a=1") == ["a=1"]
    assert manifests.assignments_of(["a=1", "b=2"]) == ["a=1", "b=2"]
    assert manifests.assignments_of(None) == []


@pytest.mark.parametrize(
    ("program", "field"),
    [
        ("digits", {"builtin": "digits"}),
        ("my_package.model", {"module": "my_package.model"}),
        ("some/Program_2.py", {"file": str(Path("some/Program_2.py").resolve())}),
        ("3d_unet.py", {"file": str(Path("3d_unet.py").resolve())}),
        (f"{'long_' * 9}name.py", {"file": str(Path(f"{'long_' * 9}name.py").resolve())}),
    ],
)
def test_a_program_gives_a_manifest(program: str, field: dict[str, str]) -> None:
    assert manifests.is_program(program)
    made = manifests.program_manifest(program, {"plant-a": 2, "plant-b": 1}, None)
    made = manifests.with_fields(
        made, {"stop": {"max_seconds": 0}, "min_sites": 1, "exchange": {"policy": "full"}}
    )
    made["spec"]["trainer"]["stop"] = {"maxSeconds": 5}
    made["spec"]["trainer"].setdefault("dataset", {"name": "digits"})
    job = load_job(made)
    assert made["spec"]["trainer"]["program"] == field
    assert [(each.site, each.index) for each in job.workers()] == [
        ("plant-a", 0), ("plant-a", 1), ("plant-b", 0),
    ]  # fmt: skip
    assert job.spec.min_sites == 1
    assert job.spec.exchange.policy == "full"


def test_sites_are_a_number_names_or_workers_by_name() -> None:
    def workers(sites: Any, count: int | None) -> dict[str, int]:
        found = manifests.site_list(sites, count)
        return {site["name"]: site["groups"][0]["workers"] for site in found}

    assert workers(2, None) == {"site-1": 1, "site-2": 1}
    assert workers(["a", "b"], 3) == {"a": 3, "b": 3}
    assert workers("a", None) == {"a": 1}
    assert workers({"a": 2, "b": 1}, 9) == {"a": 2, "b": 1}
    assert workers("a", 0) == {"a": 0}, "the manifest's validation refuses it"


def test_numbers_of_numpy_are_numbers() -> None:
    changes = {
        "stop": {"maxSteps": np.int64(3)}, "optimizer": {"learningRate": np.float32(0.5)},
    }  # fmt: skip
    count: Any = np.int64(2)
    workers: Any = np.int64(3)
    sites = manifests.site_list(count, workers)
    program = manifests.with_fields(manifests.program_manifest("digits", 2, workers), changes)
    file = manifests.read_manifest(ROOT / "examples" / "own-model" / "job.yaml")
    for given in (
        manifests.read_manifest(program),
        manifests.changed(file, {**changes, "sites": sites}, workers=workers),
    ):
        job = load_job(given.document.value)
        assert [site.groups[0].workers for site in job.spec.sites] == [3, 3]
        trainer = job.spec.trainer
        assert (trainer.stop.max_steps, trainer.optimizer.learning_rate) == (3, 0.5)
    assert manifests.assignments_of({"runId": np.int64(2)}) == ["runId=2"]
    assert manifests.assignments_of({"suspend": np.bool_(True)}) == ["suspend=true"]


def test_a_value_that_contains_itself_is_refused() -> None:
    cyclic: dict[str, Any] = {}
    cyclic["itself"] = cyclic
    manifest = manifests.read_manifest(smallest())
    with pytest.raises(errors.SpecError, match="contains itself"):
        manifests.changed(manifest, {"evaluation": cyclic}, workers=None)
    with pytest.raises(errors.SpecError, match="contains itself"):
        manifests.read_manifest(cyclic)
    with pytest.raises(errors.SpecError, match=r"trainer: .* contains itself"):
        manifests.assignments_of({"trainer": cyclic})


def test_a_site_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.SpecError, match=r"spec\.sites\[1\]\.name"):
        dlion.train("digits", sites=["a", "a"], stop={"maxSteps": 1}, root=tmp_path)


def test_fields_change_a_manifest_and_keep_the_rest() -> None:
    given = manifests.read_manifest(ROOT / "examples" / "digits.yaml")
    made = manifests.changed(given, {"stop": {"maxSteps": 5}}, workers=2)
    before, after = given.document.value, made.document.value
    assert after["spec"]["trainer"]["stop"] == {"maxSeconds": 60, "maxSteps": 5}
    assert [site["groups"][0]["workers"] for site in after["spec"]["sites"]] == [2, 2]
    assert before["spec"]["trainer"]["stop"] == {"maxSeconds": 60}, "the given manifest stays"
    assert after["spec"]["exchange"] == before["spec"]["exchange"]
    assert made.file == given.file
    assert manifests.changed(given, {}, workers=None) is given


def test_a_program_without_an_end_names_the_missing_argument(tmp_path: Path) -> None:
    with pytest.raises(errors.SpecError, match=r"manifest: .*\n  spec\.trainer\.stop: is missing"):
        dlion.train("digits", sites=2, root=tmp_path)
    with pytest.raises(errors.SpecError, match=r"spec\.unheardOf"):
        dlion.train("digits", stop={"maxSteps": 1}, unheard_of=1, root=tmp_path)
    with pytest.raises(errors.SpecError, match=r"epochs: .*maxEpochs.*\n.*batch_size: .*initial"):
        dlion.train("digits", epochs=3, batch_size=32, root=tmp_path)
    assert not list(tmp_path.iterdir())


HARD = "\x00\x1f\x7f\x80\x85\x9f\xa0\u2028\u2029\ufeff\ufffd\ufffe\uffff\U0001f600"


def test_every_character_arrives_in_the_run_unchanged(tmp_path: Path) -> None:
    """YAML requires escapes for some characters and folds others."""
    document = smallest()
    document["metadata"]["annotations"] = {"note": HARD, HARD: ""}
    given = manifests.read_manifest(document)
    assert given.document.value == document
    text = manifests.yaml_text(document)
    assert manifests.read_manifest(text + "\n").document.value == document
    (assignment,) = manifests.assignments_of({"metadata.annotations.note": HARD})
    assert apply_set({}, [assignment]) == {"metadata": {"annotations": {"note": HARD}}}


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("ProgramFailed", ExitCode.PROGRAM),
        ("DataFailed", ExitCode.DATA),
        ("InvalidSpec", ExitCode.SPEC),
        ("ModelLost", ExitCode.MODEL_LOST),
        ("EndedEarly", ExitCode.ENDED_EARLY),
        ("Failed", ExitCode.FAILED),
        ("Killed", ExitCode.FAILED),
        ("Completed", ExitCode.FAILED),
    ],
)
def test_a_failed_job_has_the_exit_code_of_its_command(reason: str, code: ExitCode) -> None:
    job = dlion.Job(name="digits", backend="local", state="Failed", reason=reason)
    assert errors.JobEndedError(job, "Succeeded").exit_code == code


def test_an_invalid_assignment_name_or_folder_is_a_dlion_error(tmp_path: Path) -> None:
    client = dlion.Client("local", root=tmp_path)
    wrong: Any = [1]
    with pytest.raises(errors.SpecError, match="must be path=value"):
        client.train(str(ROOT / "examples" / "digits.yaml"), environment="quickstart", set=wrong)
    number: Any = 5
    with pytest.raises(errors.SpecError, match="is not a job's name"):
        client.get_job(number)
    (tmp_path / "file").touch()
    with pytest.raises(errors.DLionError, match="cannot make the result folder") as raised:
        dlion.Client("local", root=tmp_path / "file").train(str(ROOT / "examples" / "digits.yaml"))
    assert raised.value.exit_code == ExitCode.STORAGE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sites": 3.5}, r"sites: are not sites \(given: 3.5\); allowed: their number up to 64"),
        ({"sites": True}, r"sites: .*given: True"),
        ({"sites": 10**12}, r"sites: .*given: 10{12}"),
        ({"exchange": "full", "policy": "full"}, r"exchange: has no fields \(given: 'full'\)"),
        ({"dataset": 5, "validation_split": 0.2}, r"dataset: has no fields \(given: 5\)"),
        ({"dataset": 5}, r"dataset: must be a mapping \(given: 5\)"),
        ({"data_root": 5}, r"data_root: is not a path \(given: 5\); allowed: a str or"),
        ({"root": 5}, r"root: is not a path \(given: 5\)"),
        ({"root": "a\0"}, r"root: is not a path"),
        ({"data_root": "a\0"}, r"data_root: is not a path"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.SpecError, match=message):
        dlion.train("digits", stop={"maxSteps": 1}, **({"root": tmp_path} | arguments))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("name", "message"), [("none", "there is no such folder"), ("x" * 300, "File name too long")]
)
def test_a_missing_data_root_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(errors.DataError, match=rf"data_root: .*{message}"):
        dlion.train("digits", stop={"maxSteps": 1}, root=tmp_path, data_root=tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_program_with_a_null_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.SpecError, match="program: is not a path"):
        dlion.train("a\0.py", root=tmp_path)


def test_fields_to_set_are_a_dict_or_a_list(tmp_path: Path) -> None:
    wrong: Any = 5
    with pytest.raises(errors.SpecError, match=r"set: has no fields to set \(given: 5\)"):
        dlion.Client(root=tmp_path).train(smallest(), set=wrong)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("digitz", "Did you mean digits?"), ("jobyaml", "Did you mean job.yaml?"), ("x" * 9, "")],
)
def test_a_misspelt_program_is_refused_immediately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    (tmp_path / "job.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.SpecError, match="no built-in program, module or file") as raised:
        dlion.train(name, stop={"maxSteps": 1}, root=tmp_path / "runs")
    assert str(raised.value).endswith(hint or ".yaml file")
    assert not (tmp_path / "runs").exists()


def test_an_existing_module_is_a_valid_program_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digitz.py").touch()
    monkeypatch.chdir(tmp_path)
    check_program_name("digitz")
    check_program_name("email.mime")

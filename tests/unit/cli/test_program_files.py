"""Facts: `dlion validate` and `dlion submit` find what is wrong with a program file without running
it; `validate` then runs it on one batch, but not with --no-run, nor where its data or TensorFlow
are missing; `submit` looks for what is wrong before it looks for a cluster. A program alone in its
file becomes a ConfigMap named after its text, the same at each site; one that needs other files, or
is too long, is refused with the way out. One in an image, built in or in a ConfigMap is left alone.

Left out: what an API server makes of it (tests/cluster/test_cli), how pods run it
(tests/cluster/test_training).
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_cli.inputs.program_files import MAX_PROGRAM_BYTES, PackedProgram, packed_program
from local_run import job_document
from own_programs import PROBABILITIES, TWO_INPUTS

MODEL = "load_data = None\n\n\ndef build_model():\n    return None\n"


def packed(folder: Path, **trainer: Any) -> tuple[PackedProgram | None, list[str]]:
    """What is sent of a job in that folder, and the problems' messages."""
    trainer = {"program": {"file": "mine.py"}, **trainer}
    job = load_job(job_document(2, trainer=trainer))
    program, problems = packed_program(job, folder)
    return program, [problem.message for problem in problems]


@pytest.mark.parametrize("command", ["validate", "submit"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("def f(:\n", "mine.py:1: is not Python"),
        ("load_data = 1\n", "has no build_model()"),
        ("build_model = 1\n", "there are no data"),
        ("\0", "is not Python"),
        ("(" * 100_000, "is not Python"),
    ],
)
def test_a_wrong_program_is_found_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str | None, said: str
) -> None:
    manifest = tmp_path / "job.yaml"
    document = job_document(2, trainer={"program": {"file": "mine.py"}})
    manifest.write_text(yaml.safe_dump(document))
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    code = main(
        [command, str(manifest), *(["--kubeconfig", "none"] if command == "submit" else [])]
    )
    error = " ".join(capsys.readouterr().err.split())
    assert code == ExitCode.SPEC
    assert "line " in error
    assert "spec.trainer.program.file: " in error
    assert said in error
    assert "kubeconfig" not in error


def own_job(folder: Path, text: str, **trainer: Any) -> str:
    """The manifest of a job with that program."""
    (folder / "mine.py").write_text(text)
    trainer = {"program": {"file": "mine.py"}, "dataset": {}, **trainer}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job_document(2, trainer=trainer)))
    return str(manifest)


def test_a_program_is_run_on_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it prints is no part of the result."""
    manifest = own_job(
        tmp_path, f"import os\nprint('hello')\nos.system('echo again')\n{TWO_INPUTS.text}"
    )
    assert main(["validate", manifest, "-o", "json"]) == 0
    captured = capsys.readouterr()
    (result,) = json.loads(captured.out)
    assert result["note"].startswith("its program trains: ")
    assert "has 400 samples with " in result["note"]
    assert "hello" in captured.err
    assert "again" in captured.err
    assert list(tmp_path.glob("*.keras")) == []


@pytest.mark.parametrize(
    ("change", "said", "is_of_data"),
    [
        (("Dense(3,", "Dense(2,"), "the wrong shape (given: [2]", False),
        (("return x, np", "raise OSError('no disk')  #"), "OSError: no disk", True),
    ],
)
def test_a_program_that_fails_on_its_first_batch_is_found(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: tuple[str, str],
    said: str,
    is_of_data: bool,
) -> None:
    """What else fails: tests/unit/worker/training/test_trial."""
    manifest = own_job(tmp_path, PROBABILITIES.text.replace(*change))
    assert main(["validate", manifest]) == ExitCode.PROGRAM
    error = capsys.readouterr().err
    assert "spec.trainer.program.file: program mine.py: " in error
    assert said in error
    assert ("--no-run" in error) == is_of_data
    assert ("Traceback" in error) == is_of_data
    assert main(["validate", "--no-run", manifest]) == 0


def test_a_program_that_ends_its_process_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = own_job(tmp_path, f"import os\nos._exit(0)\n{PROBABILITIES.text}")
    assert main(["validate", manifest]) == ExitCode.PROGRAM
    assert "program mine.py: it ended its process with exit code 0" in capsys.readouterr().err


def test_what_is_beside_the_program_or_goes_on_after_it_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module with a name of Python's own, in the current folder; a process of the program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tempfile.py").write_text("raise ImportError('not Python's')\n")
    started = "import subprocess\nsubprocess.Popen(['sleep', '60'])\n"
    manifest = own_job(tmp_path, started + PROBABILITIES.text)
    began_s = time.monotonic()
    assert main(["validate", manifest]) == 0
    assert time.monotonic() - began_s < 50


def test_no_failure_of_a_program_ends_with_0(tmp_path: Path) -> None:
    """Whatever its exit code is, here that of an error that a program may take from DLion."""
    failing = "from dlion_api.errors import DivergedError\n\n\ndef build_model():\n"
    failing += "    raise DivergedError('no')\n\n\n"
    data = PROBABILITIES.text.partition("def load_data")
    text = "import numpy as np\n" + failing + "".join(data[1:])
    text = text.replace("samples(split, site, worker_index)", "np.zeros((4, 4), 'f4')")
    assert main(["validate", own_job(tmp_path, text)]) == ExitCode.DIVERGED


def test_modules_of_one_name_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each manifest is tried with the module in its own folder."""
    manifests = []
    for name, text in (("a", PROBABILITIES.text), ("b", PROBABILITIES.text.replace("(3,", "(2,"))):
        (tmp_path / name).mkdir()
        manifests.append(own_job(tmp_path / name, text, program={"module": "mine"}))
    assert main(["validate", *manifests]) == ExitCode.PROGRAM
    captured = capsys.readouterr()
    assert "a/job.yaml: DLionJob default/test#1 is valid" in captured.out
    assert "spec.trainer.program.module: program mine: " in captured.err


def test_a_program_is_not_run_where_it_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note says so: the manifest is valid."""
    failing = f"{PROBABILITIES.text}\n\nraise ValueError\n"
    manifest = own_job(tmp_path, failing, dataset={"path": "none.npz", "format": "npz"})
    assert main(["validate", manifest]) == 0
    said = capsys.readouterr().out
    assert "its program not run: " in said
    assert "no such file or directory: " in said
    manifest = own_job(tmp_path, failing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["validate", manifest]) == 0
    assert "its program not run: TensorFlow is not installed here" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        MODEL,
        "build_model = load_data = lambda *_: None\n",
        "from keras_models import build_model, load_data\n",
        "from keras_models import *\n",
        f"{MODEL}try:\n    from a import build_model\nexcept ImportError:\n    pass\n",
    ],
)
def test_a_program_is_sent_under_the_hash_of_its_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    program, problems = packed(tmp_path)
    assert not problems
    assert program is not None
    assert program.name.startswith("test-program-")
    assert program.field == {"configMap": {"name": program.name, "key": "mine.py"}}
    load_job(job_document(2, trainer={"program": program.field}))
    owner = {"uid": "1"}
    document = program.document("there", owner)
    assert document["data"] == {"mine.py": text}
    assert document["metadata"] == {
        "name": program.name, "namespace": "there", "ownerReferences": [owner]
    }  # fmt: skip
    assert packed(tmp_path)[0] == program
    (tmp_path / "mine.py").write_text(text + "# another\n")
    other, _ = packed(tmp_path)
    assert other is not None
    assert other.name != program.name


def test_a_name_that_a_config_map_cannot_hold_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "my modèle.py").write_text(MODEL)
    program, problems = packed(tmp_path, program={"file": "my modèle.py"})
    assert not problems
    assert program is not None
    assert program.key == "program.py"


@pytest.mark.parametrize(
    ("text", "beside", "said"),
    [
        (f"import layers\n{MODEL}", "layers.py", "needs layers beside it"),
        (f"{MODEL}    from layers.conv import x\n", "layers/__init__.py", "needs layers beside it"),
        (f"from . import x\n{MODEL}", "x.py", "needs a relative module beside it"),
        (f"{MODEL}#{'x' * MAX_PROGRAM_BYTES}", "none", "does not fit into a ConfigMap"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, text: str, beside: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).touch()
    program, problems = packed(tmp_path)
    assert program is None
    assert [said in problem for problem in problems] == [True]
    assert packed(tmp_path, image="ours:1") == (None, [])


def test_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(
        "# coding: latin-1\n# é\n".encode("latin-1") + MODEL.encode()
    )
    assert packed(tmp_path) == (None, ["does not fit into a ConfigMap"])


def test_a_module_is_refused_only_where_it_is_a_folder_beside_the_manifest(tmp_path: Path) -> None:
    assert packed(tmp_path, program={"module": "ours.vision"}) == (None, [])
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").touch()
    _, problems = packed(tmp_path, program={"module": "ours.vision"})
    assert problems == ["needs ours beside it, and only one file is sent to a cluster"]


def test_other_programs_are_left_alone(tmp_path: Path) -> None:
    for program in ({"builtin": "digits"}, {"configMap": {"name": "mine", "key": "job.py"}}):
        assert packed(tmp_path, program=program, dataset={"name": "digits"}) == (None, [])


def test_the_cluster_may_be_named_before_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for kubectl."""
    for arguments in (["--kubeconfig", "none", "get"], ["get", "--kubeconfig", "none"]):
        assert main(arguments) == ExitCode.DATA
        assert "none" in capsys.readouterr().err
    assert main(["--context", "x", "validate", str(tmp_path)]) == ExitCode.USAGE
    assert "validate does not use a cluster" in capsys.readouterr().err

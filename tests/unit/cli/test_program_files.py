"""Test how `dlion validate` and `dlion submit` check and pack program files.

- Both find faults of a program without running it. `validate` then runs it on one batch, but not
  with --no-run, nor if its data or TensorFlow are missing. `submit` checks it before it looks for a
  cluster.
- A program becomes a ConfigMap with the modules beside it, named after all their text, the same at
  each site. Too long a text, or an invalid key, is refused with the alternative.
- A program in an image, built in or in a ConfigMap is not changed.

Left out: an API server (tests/cluster/test_cli), pods that run it (tests/cluster/test_training).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dlion_api.exit_codes import ExitCode
from dlion_api.spec import load_job
from dlion_cli.__main__ import main
from dlion_cli.inputs.program_files import (
    MAX_PROGRAM_BYTES,
    PackedProgram,
    packed_program,
    program_problems,
)
from local_run import job_document
from own_programs import PROBABILITIES, TWO_INPUTS

MODEL = "load_data = None\n\n\ndef build_model():\n    return None\n"


def packed(folder: Path, **trainer: Any) -> tuple[PackedProgram | None, list[str]]:
    """Return the objects sent for the job in that folder, and the messages of its problems."""
    trainer = {"program": {"file": "mine.py"}, **trainer}
    job = load_job(job_document(2, trainer=trainer))
    problems = program_problems(job, folder)
    program, more = (None, []) if problems else packed_program(job, folder)
    problems += more
    return program, [problem.message for problem in problems]


@pytest.mark.parametrize("command", ["validate", "submit", "run"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("def f(:\n", "mine.py:1: is not Python"),
        ("load_data = 1\n", "has no build_model()"),
        ("build_model = 1\n", "there are no data"),
        ("\0", "is not Python"),
        ("(" * 100_000, "is not Python"),
        (f"import numpy\n{MODEL}", "mine.py:1: imports numpy, and "),
        (f"from .numpy import x\n{MODEL}", "mine.py:1: is a relative import"),
    ],
)
def test_a_faulty_program_is_found_before_any_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str | None, message: str
) -> None:
    manifest = tmp_path / "job.yaml"
    document = job_document(2, trainer={"program": {"file": "mine.py"}})
    manifest.write_text(yaml.safe_dump(document))
    (tmp_path / "numpy.py").touch()
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    code = main(
        [command, str(manifest), *(["--kubeconfig", "none"] if command == "submit" else [])]
    )
    error = " ".join(capsys.readouterr().err.split())
    assert code == ExitCode.PROGRAM
    assert command == "run" or "line " in error
    assert command == "run" or "spec.trainer.program.file: " in error
    assert message in error
    assert "kubeconfig" not in error


def own_job(folder: Path, text: str, **trainer: Any) -> str:
    """Return the manifest of a job with that program."""
    (folder / "mine.py").write_text(text)
    trainer = {"program": {"file": "mine.py"}, "dataset": {}, **trainer}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job_document(2, trainer=trainer)))
    return str(manifest)


@pytest.fixture
def slow_link(tmp_path: Path) -> str:
    """The file of an environment in which two seconds are too short for an exchange."""
    path = tmp_path / "slow.yaml"
    workers = [{"count": 2, "cores": 1, "mbitPerS": 0.001}]
    path.write_text(yaml.safe_dump({"name": "slow", "workers": workers}))
    return str(path)


def assert_trained_with_a_slow_exchange(result: dict[str, Any]) -> None:
    assert result["note"].startswith("its program trains: ")
    assert "(0.001 Mbit/s) takes" in result["warning"]
    assert "longer than the run: 2 s" in result["warning"]


def test_a_program_runs_on_one_batch(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    slow_link: str,
) -> None:
    """Its output is not part of the result. An exchange that takes longer than the run is warned
    of.

    A module in the current folder with the name of one of Python's own has no effect, nor does a
    process of the program that continues.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tempfile.py").write_text("raise ImportError('not Python's')\n")
    pid_file = tmp_path / "sleep.pid"
    started = (
        "import os, pathlib, subprocess\n"
        f"left = subprocess.Popen(['sleep', '3600'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(left.pid))\n"
    )
    printing = "print('hello')\nos.system('echo again')\n"
    text = f"{started}{printing}{TWO_INPUTS.text}"
    manifest = own_job(tmp_path, text, stop={"maxSeconds": 2})
    assert main(["validate", manifest, "-e", slow_link, "-o", "json"]) == 0
    os.kill(int(pid_file.read_text()), signal.SIGKILL)  # it was not waited for: it still runs
    captured = capsys.readouterr()
    (result,) = json.loads(captured.out)
    assert_trained_with_a_slow_exchange(result)
    assert "has 400 samples with " in result["note"]
    assert "hello" in captured.err
    assert "again" in captured.err
    assert list(tmp_path.glob("*.keras")) == []


def test_a_built_in_program_is_tried_for_the_size_of_its_exchange_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slow_link: str
) -> None:
    """The size of the model is known from the trial only."""
    manifests = []
    for policy in ("full", "none"):
        path = tmp_path / f"{policy}.yaml"
        trainer = {"stop": {"maxSeconds": 2}}
        document = job_document(2, trainer=trainer, exchange={"policy": policy})
        path.write_text(yaml.safe_dump(document))
        manifests.append(str(path))
    words = [*manifests, "-e", slow_link]
    assert main(["validate", *words, "-o", "json"]) == 0
    warned, silent = json.loads(capsys.readouterr().out)
    assert_trained_with_a_slow_exchange(warned)
    assert (silent["note"], silent["warning"]) == ("", "")
    assert main(["validate", "--no-run", *words]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_program_whose_data_fail_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other failures: tests/unit/worker/training/test_trial."""
    failing = PROBABILITIES.text.replace("return x, np", "raise OSError('no disk')  #")
    manifest = own_job(tmp_path, failing)
    assert main(["validate", manifest]) == ExitCode.PROGRAM
    error = capsys.readouterr().err
    assert "spec.trainer.program.file: program mine.py: " in error
    assert "OSError: no disk" in error
    assert "--no-run" in error
    path = tmp_path / "mine.py"
    assert f'Traceback (most recent call last):\n  File "{path}", line ' in error
    assert main(["validate", "--no-run", manifest]) == 0


def test_a_folder_without_samples_is_not_a_fault_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    dataset = {"path": "images", "format": "images"}
    manifest = own_job(tmp_path, PROBABILITIES.text, dataset=dataset)
    assert main(["validate", manifest, "--data-root", str(tmp_path)]) == ExitCode.DATA
    error = capsys.readouterr().err
    assert "spec.trainer.dataset.path: " in error
    assert "no images found" in error
    assert "Traceback" not in error


def test_a_batch_that_the_program_rejects_is_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = np.arange(30) % 3
    np.savez(tmp_path / "data.npz", x=np.zeros((30, 4), np.float32), y=y)
    dataset = {"path": "data.npz", "format": "npz"}
    rejecting = "def loss(y, outputs):\n    import tensorflow as tf\n"
    rejecting += "    return tf.debugging.check_numerics(tf.reduce_sum(outputs, 1) / 0.0, 'bad')\n"
    text = PROBABILITIES.text.partition("def load_data")[0] + rejecting
    manifest = own_job(tmp_path, text, dataset=dataset)
    assert main(["validate", manifest, "--data-root", str(tmp_path)]) == ExitCode.DATA
    error = capsys.readouterr().err
    assert "spec.trainer.program.file: program mine.py: TensorFlow rejected a batch" in error
    assert "dataset.path" not in error


@pytest.mark.slow  # the other failures have the codes of a program and of data
def test_no_failure_of_a_program_ends_with_0(tmp_path: Path) -> None:
    """Any other exit code is kept, here that of an error class of DLion."""
    failing = "from dlion_api.errors import DivergedError\n\n\ndef build_model():\n"
    failing += "    raise DivergedError('no')\n\n\n"
    data = PROBABILITIES.text.partition("def load_data")
    text = "import numpy as np\n" + failing + "".join(data[1:])
    text = text.replace("samples(split, site, worker_index)", "np.zeros((4, 4), 'f4')")
    assert main(["validate", own_job(tmp_path, text)]) == ExitCode.DIVERGED


def test_modules_of_one_name_are_distinguished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each manifest is tried with the module in its own folder; one ends its process."""
    manifests = []
    ending = f"import os\nos._exit(0)\n{PROBABILITIES.text}"
    for name, text in (("a", PROBABILITIES.text), ("b", ending)):
        (tmp_path / name).mkdir()
        manifests.append(own_job(tmp_path / name, text, program={"module": "mine"}))
    assert main(["validate", *manifests]) == ExitCode.PROGRAM
    captured = capsys.readouterr()
    assert "a/job.yaml: DLionJob default/test#1 is valid" in captured.out
    assert "spec.trainer.program.module: program mine: " in captured.err
    assert "program mine: it ended its process with exit code 0" in captured.err
    assert "--no-run" not in captured.err
    assert "Traceback" not in captured.err


def test_a_program_that_cannot_run_here_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note or a warning reports it: the manifest is valid."""
    failing = f"{PROBABILITIES.text}\n\nraise ValueError\n"
    manifest = own_job(tmp_path, failing, encoder="none.keras")
    assert main(["validate", manifest]) == 0
    captured = capsys.readouterr()
    assert "is valid, its program not run: its data are not here" in captured.out
    assert "job.yaml: warning: trainer.encoder: no such file or directory: " in captured.err
    assert "On this machine `dlion run` would end with 66" in captured.err
    assert main(["validate", manifest, "--no-run"]) == 0
    assert "warning" not in capsys.readouterr().err
    manifest = own_job(tmp_path, failing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["validate", manifest]) == 0
    assert "its program not run: TensorFlow is not installed here" in capsys.readouterr().out


def test_a_fault_is_found_without_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = PROBABILITIES.text.replace("layers.Dense(16,", "Own(16,")
    manifest = own_job(tmp_path, failing, dataset={"path": "none.npz", "format": "npz"})
    assert main(["validate", manifest]) == ExitCode.PROGRAM
    error = capsys.readouterr().err
    assert "mine.py:" in error
    assert "NameError: name 'Own' is not defined" in error
    assert "use --no-run" in error
    assert main(["validate", manifest, "--no-run"]) == 0


@pytest.mark.parametrize("program", [None, "mine.py"])
def test_missing_data_are_a_warning_and_an_error_of_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str | None
) -> None:
    (tmp_path / "mine.py").write_text(PROBABILITIES.text)
    trainer: dict[str, Any] = {"dataset": {"path": "none.npz", "format": "npz"}}
    trainer |= {"program": {"file": program}} if program else {}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job_document(1, trainer=trainer)))
    words = [str(manifest), "--data-root", str(tmp_path)]
    assert main(["validate", "-o", "json", *words]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["valid"], result["exitCode"]) == (True, 0)
    warned, _, ends = result["warning"].partition(". On this machine ")
    assert ends == "`dlion run` would end with 66"
    assert ("made-up samples [4] with 3 classes; one batch trained" in result["note"]) == bool(
        program
    )
    assert main(["run", *words]) == ExitCode.DATA
    assert warned in " ".join(capsys.readouterr().err.split())


def test_missing_data_with_a_missing_program_are_not_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dlion run` ends with the code of the program, not with that of the data."""
    trainer = {"dataset": {"path": "no.npz", "format": "npz"}, "program": {"file": "no.py"}}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(yaml.safe_dump(job_document(1, trainer=trainer)))
    words = [str(manifest), "--data-root", str(tmp_path)]
    assert main(["run", *words]) == ExitCode.PROGRAM
    assert main(["validate", *words]) == ExitCode.PROGRAM
    assert "would end with" not in capsys.readouterr().err


def test_invalid_manifests_determine_the_code_before_a_faulty_program(tmp_path: Path) -> None:
    program = job_document(2, trainer={"program": {"file": "none.py"}})
    for others, code in (([], ExitCode.PROGRAM), ([{"kind": "Job"}], ExitCode.SPEC)):
        manifest = tmp_path / "job.yaml"
        manifest.write_text(yaml.safe_dump_all([program, *others]))
        assert main(["submit", str(manifest), "--kubeconfig", "none"]) == code
        assert main(["validate", "--no-run", str(manifest)]) == code


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


def test_an_invalid_config_map_key_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "my modèle.py").write_text(MODEL)
    program, problems = packed(tmp_path, program={"file": "my modèle.py"})
    assert not problems
    assert program is not None
    assert program.key == "program.py"


def test_the_modules_beside_a_program_are_sent_with_it(tmp_path: Path) -> None:
    """A single program keeps the name that it had before modules were sent."""
    (tmp_path / "mine.py").write_text(MODEL)
    alone, _ = packed(tmp_path)
    assert alone is not None
    assert alone.name == f"test-program-{hashlib.sha256(MODEL.encode()).hexdigest()[:10]}"
    texts = {
        "mine.py": f"import net.layers\nimport helper\n{MODEL}",
        "net/__init__.py": "",
        "net/layers.py": "from . import losses\n",
        "net/losses.py": "# é\r\n",
        "helper.py": "x = 1\n",
    }
    (tmp_path / "net").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    for other in ("net/unused.py", "unused.py", "data.npz"):
        (tmp_path / other).touch()
    program, problems = packed(tmp_path)
    assert not problems
    assert program is not None
    assert program.key == "mine.py"
    document = program.document("there", None)
    keys = {name.replace("/", "."): text for name, text in texts.items()}
    assert document["data"] == keys
    names = {program.name}
    for name, text in texts.items():
        (tmp_path / name).write_text(f"{text}# another\n")
        other_program, _ = packed(tmp_path)
        assert other_program is not None
        names.add(other_program.name)
    assert len(names) == 1 + len(texts)


def test_data_files_that_modules_name_are_sent_beside_them(tmp_path: Path) -> None:
    """A ConfigMap has one folder: there each module finds its file by `__file__`."""
    load = "from pathlib import Path\nHERE = Path(__file__).parent\n"
    texts = {
        "mine.py": f"{load}import net.layers\nx = (HERE / 'head.npy').read_bytes()\n{MODEL}",
        "net/layers.py": f"{load}y = (HERE / 'body.npy').read_bytes()\n",
    }
    data = {"head.npy": b"\x93\xff", "net/body.npy": b"\0"}
    (tmp_path / "net").mkdir()
    for name, content in {**data, "unused.npy": b"", "body.npy": b"another"}.items():
        (tmp_path / name).write_bytes(content)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    program, _ = packed(tmp_path)
    assert program is not None
    document = program.document("there", None)
    assert document["data"].keys() == {"mine.py", "net.layers.py"}
    assert document["binaryData"] == {"head.npy": "k/8=", "body.npy": "AA=="}
    names = {program.name}
    for name, content in data.items():
        (tmp_path / name).write_bytes(content + b"x")
        other, _ = packed(tmp_path)
        assert other is not None
        names.add(other.name)
    assert len(names) == 1 + len(data)
    (tmp_path / "head.npy").write_bytes(b"x" * MAX_PROGRAM_BYTES)
    _, (problem,) = packed(tmp_path)
    assert problem.startswith("program, modules and data files, 92")
    (tmp_path / "head.npy").unlink()
    (tmp_path / "mine.py").write_text(texts["mine.py"].replace("head", "body"))
    _, (problem,) = packed(tmp_path)
    assert problem.endswith("body.npy would have one key of a ConfigMap")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file, still absent, that the program beside it names."""
    (tmp_path / "mine.py").write_text(f"x = __file__, 'weights.h5'\n{MODEL}")
    return tmp_path / "weights.h5"


def test_a_data_file_outside_the_folder_is_refused(weights: Path) -> None:
    """A program of others, with a link to a key of the user, must not publish the key."""
    weights.symlink_to(Path("/etc/hostname"))
    _, problems = packed(weights.parent)
    assert problems == [f"{weights} leads out of the program's folder"]
    weights.unlink()
    (weights.parent / "v2.h5").write_bytes(b"x")
    weights.symlink_to("v2.h5")
    program, _ = packed(weights.parent)
    assert program is not None
    assert program.data == {"weights.h5": b"x"}


def test_a_data_file_that_cannot_fit_is_not_read(weights: Path) -> None:
    with weights.open("wb") as file:
        file.truncate(64 * 2**20)
    tracemalloc.start()
    try:
        _, (problem,) = packed(weights.parent)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert problem.endswith("do not fit into a ConfigMap")
    assert peak_bytes < 2**20


def test_a_data_file_that_cannot_be_read_is_a_problem_of_the_program(weights: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder, user = Path(place), os.geteuid()
        folder.chmod(0o755)
        shutil.copy(weights.with_name("mine.py"), folder)
        (folder / weights.name).touch(0)
        if user == 0:
            os.seteuid(65534)
        try:
            _, problems = packed(folder)
        finally:
            os.seteuid(user)
    assert problems == [f"{folder / weights.name}: cannot be read: Permission denied"]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"net.py": f"#{'x' * MAX_PROGRAM_BYTES}"}, "program and modules, 921,"),
        ({f"m{n}.py": f"#{'x' * 400_000}" for n in range(3)}, "program and modules, 1,200,"),
        ({"modèle.py": ""}, "'modèle.py' cannot be a key"),
        ({f"{'x' * 200}/{'y' * 60}.py": ""}, "yyy.py' cannot be a key"),
        ({"net.py": b"# coding: latin-1\n# \xe9\n"}, "net.py does not fit into a ConfigMap"),
        ({"net.py": "def f(:"}, "net.py:1: is not Python"),
    ],
)
def test_modules_that_do_not_fit_are_refused(
    tmp_path: Path, modules: dict[str, str | bytes], message: str
) -> None:
    names = [name.removesuffix(".py").replace("/", ".") for name in modules]
    (tmp_path / "mine.py").write_text(f"import {', '.join(names)}\n{MODEL}")
    for name, content in modules.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    program, problems = packed(tmp_path)
    assert program is None
    assert [message in problem for problem in problems] == [True], problems
    assert packed(tmp_path, image="ours:1") == (None, [])


def test_a_program_that_is_too_long_is_refused_with_the_alternative(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"{MODEL}#{'x' * MAX_PROGRAM_BYTES}")
    job = load_job(job_document(2, trainer={"program": {"file": "mine.py"}}))
    _, (problem,) = packed_program(job, tmp_path)
    assert "program and modules, 921," in problem.message
    assert "docs/images.md, Packages of your own" in problem.advice


def test_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(
        "# coding: latin-1\n# é\n".encode("latin-1") + MODEL.encode()
    )
    assert packed(tmp_path) == (None, ["mine.py does not fit into a ConfigMap"])


def test_a_key_of_the_program_that_a_module_needs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").touch()
    (tmp_path / "a.b.py").write_text(f"import a.b\n{MODEL}")
    _, problems = packed(tmp_path, program={"file": "a.b.py"})
    assert problems == ["'a.b.py' cannot be a key of a ConfigMap, or is the program's key, too"]
    (tmp_path / "modèle.py").write_text(f"import helper\n{MODEL}")
    (tmp_path / "helper.py").write_text("import modèle\n")
    _, problems = packed(tmp_path, program={"file": "modèle.py"})
    assert ["'modèle.py' cannot be a key" in problem for problem in problems] == [True]


def test_a_link_to_a_program_leads_to_the_modules_beside_its_target(tmp_path: Path) -> None:
    """Python does the same when it runs the link."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real.py").write_text(f"import net\n{MODEL}")
    (tmp_path / "there" / "net.py").write_text("import real\n")
    (tmp_path / "mine.py").symlink_to("there/real.py")
    program, problems = packed(tmp_path)
    assert not problems
    assert program is not None
    assert (program.key, list(program.texts)) == ("real.py", ["real.py", "net.py"])


def test_a_module_is_refused_only_if_it_is_a_folder_beside_the_manifest(tmp_path: Path) -> None:
    assert packed(tmp_path, program={"module": "ours.vision"}) == (None, [])
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").touch()
    _, problems = packed(tmp_path, program={"module": "ours.vision"})
    assert problems == [
        "ours is beside the manifest, and trainer.program.module is not sent to a cluster"
    ]
    (tmp_path / "ours" / "vision.py").write_text(MODEL)
    (tmp_path / "mine.py").write_text("from ours.vision import *\n")
    program, problems = packed(tmp_path)
    assert not problems
    assert program is not None
    assert list(program.texts) == ["mine.py", "ours.__init__.py", "ours.vision.py"]


def test_other_programs_are_not_changed(tmp_path: Path) -> None:
    for program in ({"builtin": "digits"}, {"configMap": {"name": "mine", "key": "job.py"}}):
        assert packed(tmp_path, program=program, dataset={"name": "digits"}) == (None, [])


def test_the_cluster_may_be_named_before_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """kubectl accepts this order, too."""
    for arguments in (["--kubeconfig", "none", "get"], ["get", "--kubeconfig", "none"]):
        assert main(arguments) == ExitCode.DATA
        assert "none" in capsys.readouterr().err
    assert main(["--context", "x", "validate", str(tmp_path)]) == ExitCode.USAGE
    assert "validate does not use a cluster" in capsys.readouterr().err

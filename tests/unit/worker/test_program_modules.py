"""Tests of the modules of a program.

They are the modules beside the program that import statements name: relative imports, packages with
and without `__init__.py`, and cycles. Other files in the folder cannot be imported. Names of
installed packages and of Python's modules are refused with file and line. An editable installation
of the same file is accepted, and so are modules that only the script's folder has. Links out of the
folder are refused. Files that are not Python, missing names and thousands of modules do no harm. A
ConfigMap's keys and a folder give the same modules. Data files beside a module belong to the
program if it names them and uses `__file__`.

Left out: the use by a program (tests/unit/worker/training/test_programs); the transfer
(tests/unit/cli/test_program_files).
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlion_worker.program_modules import ProgramFinder, ProgramModules, find_modules

HERE = "from pathlib import Path\nHERE = Path(__file__).parent\n"


@pytest.fixture(autouse=True)
def no_modules_left() -> Iterator[None]:
    yield
    ProgramFinder(ProgramModules({}, imports_program=False, problems=())).install()


def written(folder: Path, **texts: str) -> Path:
    """Write files by dotted name (`__` ends a package); return the program."""
    for name, text in texts.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "program.py"


def found(folder: Path, **texts: str) -> list[str]:
    """Return the names of the modules; there must be no problem."""
    modules = find_modules(written(folder, **texts))
    assert modules.problems == ()
    return list(modules.files)


def problem(folder: Path, **texts: str) -> str:
    """Return the only problem."""
    (text,) = find_modules(written(folder, **texts)).problems
    return text


def loaded(modules: ProgramModules, name: str) -> types.ModuleType:
    ProgramFinder(modules).install()
    return importlib.import_module(name)


NET: dict[str, str] = {
    "net.__init__": "",
    "net.layers": "",
    "net.losses": "",
    "net.deep.__init__": "",
    "net.deep.blocks": "",
}


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("import net", ["net"]),
        ("import net.layers", ["net", "net.layers"]),
        ("import net.layers as l, net.losses", ["net", "net.layers", "net.losses"]),
        ("from net import layers", ["net", "net.layers"]),
        ("from net import layers as l, Dense", ["net", "net.layers"]),
        ("from net.deep.blocks import Block", ["net", "net.deep", "net.deep.blocks"]),
        ("from net import *", ["net"]),
        ("def f():\n    import net.losses", ["net", "net.losses"]),
        ("try:\n    import net\nexcept ImportError:\n    net = None", ["net"]),
        ("if False:\n    import net", ["net"]),
        ("import os, numpy.linalg, nothing_of_this_name", []),
        ("import net.nothing, net.layers.nothing", ["net", "net.layers"]),
        ("text = 'import net'", []),
    ],
)
def test_modules_named_by_import_statements_are_found(
    tmp_path: Path, statement: str, wanted: list[str]
) -> None:
    assert found(tmp_path, program=statement, **NET) == wanted


@pytest.mark.parametrize(
    ("module", "statement", "wanted"),
    [
        ("net.__init__", "from . import layers", {"net.layers"}),
        ("net.__init__", "from .deep import blocks", {"net.deep", "net.deep.blocks"}),
        ("net.deep.__init__", "from .. import layers", {"net.deep", "net.layers"}),
        (
            "net.deep.blocks",
            "from ..losses import L",
            {"net.deep", "net.deep.blocks", "net.losses"},
        ),
        ("net.deep.blocks", "from . import x", {"net.deep", "net.deep.blocks"}),
    ],
)
def test_relative_imports_are_followed(
    tmp_path: Path, module: str, statement: str, wanted: set[str]
) -> None:
    of_program = f"import {module.removesuffix('.__init__')}"
    names = found(tmp_path, **{"program": of_program, **NET, module: statement})
    assert set(names) == {"net", *wanted}


def test_relative_imports_outside_of_a_package_are_refused(tmp_path: Path) -> None:
    """The exception is a file that expects the failure."""
    text = problem(tmp_path, program="\nfrom .net import layers", **NET)
    assert text.startswith(
        f"{tmp_path / 'program.py'}:2: is a relative import outside of a package"
    )
    text = problem(tmp_path, program="import net", **NET | {"net.__init__": "from ... import x"})
    assert text.startswith(f"{tmp_path / 'net' / '__init__.py'}:1: is a relative import")
    tried = "try:\n    from .net import layers\nexcept ImportError:\n    from net import layers"
    assert found(tmp_path, program=tried, **NET) == ["net", "net.layers"]


def test_a_package_without_init_has_only_imported_modules(tmp_path: Path) -> None:
    texts = {"program": "import bare.deep.one", "bare.deep.one": "x = 1", "bare.two": ""}
    modules = find_modules(written(tmp_path, **texts))
    assert list(modules.files) == ["bare.deep.one"]
    assert modules.names == {"bare", "bare.deep", "bare.deep.one"}
    assert loaded(modules, "bare.deep.one").x == 1
    with pytest.raises(ModuleNotFoundError, match=r"'bare\.two': of the program's packages only"):
        importlib.import_module("bare.two")
    (tmp_path / "data").mkdir()
    assert found(tmp_path, program="import data") == []


def test_modules_may_import_each_other_in_cycles_and_the_program(tmp_path: Path) -> None:
    texts = {
        "program": "import a",
        "a": "import b",
        "b": "import c.d",
        "c.d": "import a, b, c.d, program",
    }
    modules = find_modules(written(tmp_path, **texts))
    assert (list(modules.files), modules.imports_program) == (["a", "b", "c.d"], True)
    assert not find_modules(
        written(tmp_path, program="import a", a="import b", b="")
    ).imports_program


def test_a_package_comes_before_a_module_and_a_module_before_a_bare_folder(tmp_path: Path) -> None:
    texts = {"program": "import one.x, two.x", "one": "", "one.__init__": "", "one.x": ""}
    modules = find_modules(written(tmp_path, **texts, two="", **{"two.x": ""}))
    assert {name: path.name for name, path in modules.files.items()} == {
        "one": "__init__.py", "one.x": "x.py", "two": "two.py"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["numpy", "random", "sys", "dlion_worker", "tensorflow"])
@pytest.mark.parametrize("form", ["{}", "{}.__init__"])
def test_the_name_of_an_installed_package_is_refused(tmp_path: Path, name: str, form: str) -> None:
    """It is refused once for any number of imports."""
    texts = {"program": f"# mine\nfrom {name} import x\nimport {name}, other"}
    texts |= {"other": f"import {name}", form.format(name): ""}
    text = problem(tmp_path, **texts)
    assert text.startswith(f"{tmp_path / 'program.py'}:2: imports {name}, and ")
    assert text.endswith("Rename it")
    assert "a module of Python's own" in text or "an installed package (" in text


def test_files_that_are_not_imported_may_have_any_name(tmp_path: Path) -> None:
    texts = {"program": "import net", "net": "", "numpy": "raise SystemExit", "random": ""}
    modules = find_modules(written(tmp_path, **texts))
    assert (list(modules.files), modules.problems) == (["net"], ())
    ProgramFinder(modules).install()
    assert Path(str(importlib.import_module("numpy").__file__)).parent != tmp_path


def test_an_installed_package_hides_a_folder_and_the_program_itself(tmp_path: Path) -> None:
    """As in Python, this holds for a folder of data, and for `keras.py` that imports Keras."""
    assert found(tmp_path, program="import keras.layers", **{"keras.layers": ""}) == []
    (tmp_path / "numpy.py").write_text("import numpy")
    modules = find_modules(tmp_path / "numpy.py")
    assert modules == ProgramModules({}, imports_program=False, problems=())


def test_an_installation_of_the_same_file_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installation is editable. Another file of that name is refused, but not a bare folder."""
    texts = {"program": "import net.layers, bare.one", "bare.one": ""}
    monkeypatch.syspath_prepend(tmp_path)
    assert found(tmp_path, **texts, **NET) == ["bare.one", "net", "net.layers"]
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "net", other / "net")
    shutil.copy(tmp_path / "program.py", other)
    modules = find_modules(other / "program.py")
    assert [f"({tmp_path / 'net' / '__init__.py'})" in each for each in modules.problems] == [True]
    (tmp_path / "net" / "__init__.py").unlink()
    importlib.invalidate_caches()
    modules = find_modules(other / "program.py")
    assert (list(modules.files), modules.problems) == (["net", "net.layers"], ())


FIND = """
from pathlib import Path
from dlion_worker.program_modules import find_modules
found = find_modules(Path("programs/program.py").resolve())
print([*found.files], *found.problems)
"""


@pytest.mark.parametrize(
    ("arguments", "is_refused"),
    [
        (["go.py"], False),
        (["-m", "go"], False),
        (["-c", FIND], False),
        (["-P", "go.py"], False),
        (["programs/../go.py"], False),
        (["other/run.py"], False),
        # A run has these, too.
        (["PYTHONPATH", "go.py"], True),
        (["PYTHONPATH", "-m", "go"], True),
        (["PYTHONPATH", "-P", "-c", FIND], True),
        (["PYTHONPATH", "-c", FIND], True),
    ],
)
def test_modules_in_the_folder_of_a_script_or_a_shell_are_not_installed(
    tmp_path: Path, arguments: list[str], is_refused: bool
) -> None:
    """A run does not have that folder, because `python -P` starts it."""
    written(tmp_path, helpers="X = 1", go=FIND, **{"other.run": FIND})
    written(tmp_path / "programs", program="import helpers", helpers="X = 2")
    environment = {**os.environ}
    if arguments[0] == "PYTHONPATH":
        arguments = arguments[1:]
        environment["PYTHONPATH"] = f"{tmp_path}:{environment.get('PYTHONPATH', '')}"
    output = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    if is_refused:
        assert f"has the name of an installed package ({tmp_path / 'helpers.py'})" in output
    else:
        assert output == "['helpers']\n"


def test_links_out_of_the_folder_are_refused_and_others_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    written(outside, **NET)
    folder = tmp_path / "mine"
    program = written(folder, program="import net\nimport helper", own="")
    (folder / "net").symlink_to(outside / "net")
    (folder / "helper.py").symlink_to("own.py")
    modules = find_modules(program)
    (text,) = modules.problems
    assert text.startswith(f"{program}:1: imports net, and {folder / 'net' / '__init__.py'} leads")
    assert list(modules.files) == ["helper"]
    (folder / "helper.py").unlink()
    (folder / "helper.py").symlink_to(outside / "net" / "layers.py")
    assert len(find_modules(program).problems) == 2


def test_files_that_are_not_python_are_named(tmp_path: Path) -> None:
    """The program itself is an exception: its load fails."""
    text = problem(tmp_path, program="import net", net="x = 1\ndef f(:")
    assert text.startswith(f"{tmp_path / 'net.py'}:2: is not Python: ")
    for content in ("\0", "(" * 100_000):
        assert "net.py" in problem(tmp_path, program="import net", net=content)
    (tmp_path / "net.py").write_bytes(b"\xff\xfe")
    assert "is not Python" in problem(tmp_path, program="import net")
    assert found(tmp_path, program="import net\ndef f(:") == []


def test_a_name_without_a_file_is_not_a_module(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / ".hidden.py").touch()
    (tmp_path / "__init__.py").touch()
    (tmp_path / "__main__.py").touch()
    (tmp_path / "fast.so").touch()
    long = "x" * 5_000
    names = f"folder, pipe, loop, hidden, fast, __init__, {long}, {'a.' * 3_000}a"
    assert found(tmp_path, program=f"import {names}") == []
    assert "__main__" in problem(tmp_path, program="import __main__")


def test_thousands_of_modules_are_found(tmp_path: Path) -> None:
    texts = {f"many.m{at}": f"from . import m{at + 1}" for at in range(2_000)}
    names = found(tmp_path, program="import many.m0", **texts, **{"many.m2000": ""})
    assert len(names) == 2_001


def test_keys_of_a_config_map_give_the_same_modules(tmp_path: Path) -> None:
    """A kubelet mounts them as links into a folder of links."""
    texts: dict[str, str] = {
        "program": "from net.layers import WIDTH\nimport bare.one, helper",
        "net.__init__": "from .deep import *",
        "net.layers": "WIDTH = 3",
        "net.deep.__init__": "from ..layers import WIDTH as DEPTH",
        "bare.one": f"{HERE}x = int((HERE / 'five.txt').read_text())",
        "bare.two": "",
        "helper": "import program",
    }
    program = written(tmp_path / "mine", **texts)
    (tmp_path / "mine" / "bare" / "five.txt").write_text("5")
    modules = find_modules(program)
    assert sorted(modules.keys()) == [
        "bare.one.py", "helper.py", "net.__init__.py", "net.deep.__init__.py", "net.layers.py"
    ]  # fmt: skip
    real = tmp_path / "mount" / "..2026"
    real.mkdir(parents=True)
    (real.parent / "..data").symlink_to("..2026")
    data = {path.name: path for path in modules.data_files}
    for key, path in {"program.py": program, **modules.keys(), **data}.items():
        shutil.copy(path, real / key)
        (real.parent / key).symlink_to(f"..data/{key}")
    mounted = find_modules(real.parent / "program.py", in_config_map=True)
    assert list(mounted.files) == list(modules.files)
    assert (mounted.names, mounted.imports_program) == (modules.names, modules.imports_program)
    assert mounted.problems == ()
    for each in (modules, mounted):
        assert loaded(each, "net").DEPTH == 3
        assert loaded(each, "bare.one").x == 5
        assert loaded(each, "net").__path__ is not None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("bare.two")
    in_folder: Any = find_modules(program, in_config_map=True)
    assert list(in_folder.files) == list(modules.files)


def test_files_that_a_module_names_beside_itself_belong_to_the_program(tmp_path: Path) -> None:
    program = written(
        tmp_path,
        program=f"{HERE}import net.layers, plain, tool\n"
        f"x = HERE / 'head.h5', '{'x' * 300}', '\\0', '', 'token', 'net'",
        **{
            "net.layers": f"{HERE}NAMES = ['body.h5', 'none.h5', 'below/far.h5', '.env', 'tool.py']"
        },
        plain="x = 'plain.h5'",  # without __file__
        tool="",
    )
    for name in ("head.h5", "plain.h5", "unnamed.h5", "token"):
        (tmp_path / name).touch()
    (tmp_path / "net" / "below").mkdir()
    for name in ("body.h5", "head.h5", "below/far.h5", ".env", "tool.py"):
        (tmp_path / "net" / name).touch()
    modules = find_modules(program)
    assert modules.problems == ()
    assert modules.data_files == (tmp_path / "head.h5", tmp_path / "net" / "body.h5")


def test_the_next_program_gets_its_own_modules(tmp_path: Path) -> None:
    first = find_modules(written(tmp_path / "a", program="import net, only", net="x = 1", only=""))
    second = find_modules(written(tmp_path / "b", program="import net", net="x = 2"))
    assert loaded(first, "net").x == 1
    importlib.import_module("only")
    assert loaded(second, "net").x == 2
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("only")
    assert str(tmp_path / "b") not in sys.path

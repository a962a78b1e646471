"""Loads the program of the manifest's `trainer.program`.

The user's protocol, in a file or an importable module:

    build_model() -> keras.Model
    load_data(split, site, worker_index) -> (x, y)   optional; NumPy arrays, dicts of them, or a
                                                     finite tf.data.Dataset of both
    augment(x, y) -> (x, y)                          optional; TensorFlow, on a training batch
    loss(y_true, y_pred)                             optional; a scalar or a value per sample
    accuracy(y_true, y_pred)                         optional; from 0 to 1, as loss
    optimizer() -> keras.optimizers.Optimizer        for trainer.optimizer.name: program
    callbacks() -> list of keras.callbacks.Callback  optional

`split` is "train" or "test". `worker_index` counts the workers of a site from 0, over all its
groups. The model gets `x` of type uint8 as it is. `y` holds class numbers from 0, or targets:
floats, or a dict for several outputs. Without `load_data`, the manifest's `trainer.dataset` defines
the data, and scales uint8 to 0..1. What the model was compiled with stands in for `loss`,
`accuracy` and `optimizer` (`compiled`).

A file may import modules beside it (`dlion_worker.program_modules`). One program is loaded at a
time: the next one replaces its modules.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from dlion_api.errors import ProgramError
from dlion_api.spec import Program as ProgramSpec
from dlion_worker.program_modules import ProgramFinder, find_modules
from dlion_worker.training.programs import builtin as builtins
from dlion_worker.training.programs.program import TrainingProgram, user_code

_BUILTINS: dict[str, Callable[[tuple[int, ...], int], Any]] = {
    "cipher": builtins.cipher,
    "cnn17": builtins.cnn17,
    "digits": builtins.digits,
    "mobilenet": builtins.mobilenet,
}

_OPTIONAL = ("load_data", "loss", "accuracy", "optimizer", "augment", "callbacks")
_PROTOCOL = f"A program needs build_model() and may have {', '.join(_OPTIONAL)}"


def load(spec: ProgramSpec, *, directory: Path) -> TrainingProgram:
    """The manifest's program; relative files are in `directory`.

    Raises: ProgramError; a retry does not help.
    """
    if spec.builtin:
        return builtin(spec.builtin)
    if spec.module:
        return _from_module(spec.module, directory)
    if spec.file:
        return _from_file((directory / spec.file).resolve())
    if spec.config_map and (path := directory / spec.config_map.key).is_file():
        # Not resolved: a mount's files are links, and messages should have their names.
        return _from_file(path.absolute(), in_config_map=True)
    raise ProgramError(
        "trainer.program: a config map exists only in a cluster. Name its text as `file` here"
    )


def builtin(name: str) -> TrainingProgram:
    if name not in _BUILTINS:
        raise ProgramError(
            f"trainer.program.builtin: no such program (given: {name}; allowed: "
            f"{', '.join(_BUILTINS)})"
        )
    return TrainingProgram(name=name, build=_BUILTINS[name])


def _from_file(path: Path, *, in_config_map: bool = False) -> TrainingProgram:
    if not path.is_file():
        raise ProgramError(
            f"program {path.name}: no such file: {path}. Paths are relative to the manifest; "
            "`dlion init` writes a template"
        )
    modules = find_modules(path, in_config_map=in_config_map)
    if modules.problems:
        raise ProgramError(f"program {path.name}: {'; '.join(modules.problems)}")
    sources = (path, *modules.files.values())
    stub = TrainingProgram(name=path.name, build=_no_model, sources=sources)
    name = f"dlion_program_{path.stem}"
    # Explicit loader, because a config map's key need not end in .py.
    loader = SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "the loader is given"
    module = importlib.util.module_from_spec(spec)
    # Registered first, as for imports: dataclasses and Keras' registry look up their module.
    sys.modules[name] = module
    ProgramFinder(modules).install()
    if modules.imports_program:
        sys.modules[path.name.removesuffix(".py")] = module
    with user_code(stub, "loading the file", "Correct the program and start again"):
        loader.exec_module(module)
    return _from_namespace(module, path.name, sources)


def _from_module(name: str, directory: Path) -> TrainingProgram:
    stub = TrainingProgram(name=name, build=_no_model)
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # last: a user's file must not hide an installed package
    with user_code(
        stub, "importing the module", "Install it where the trainer runs, or use program.file"
    ):
        module = importlib.import_module(name)
    sources = (Path(module.__file__),) if module.__file__ else ()
    return _from_namespace(module, name, sources)


def _from_namespace(module: ModuleType, name: str, sources: tuple[Path, ...]) -> TrainingProgram:
    for function in ("build_model", *_OPTIONAL):
        value = getattr(module, function, None)
        if value is not None and not callable(value):
            raise ProgramError(f"program {name}: {function} is not a function. {_PROTOCOL}")
    if getattr(module, "build_model", None) is None:
        raise ProgramError(f"program {name}: build_model is missing. {_PROTOCOL}")

    def build(_input_shape: tuple[int, ...], _class_count: int) -> Any:
        return module.build_model()

    optional: dict[str, Any] = {each: getattr(module, each, None) for each in _OPTIONAL}
    return TrainingProgram(name=name, build=build, sources=sources, **optional)


def _no_model(_input_shape: tuple[int, ...], _class_count: int) -> Any:
    """Placeholder in a program that is not loaded yet, for error messages only."""
    raise AssertionError

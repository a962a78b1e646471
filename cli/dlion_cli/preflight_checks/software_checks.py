"""Checks of this machine's software, for `dlion doctor`: Python, packages, TensorFlow, kernels."""

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.timed_checks import TimedCheck, last_line, run_python
from dlion_cli.terminal.failures import install_advice

MACHINE: Final = "machine"
_NEEDED_FOR: Final = {
    "worker": "run, simulate, compare, replay, calibrate and report",
    "cluster": "the commands for clusters",
}
_TENSORFLOW: Final = """
import json, os, time
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
began_s = time.monotonic()
import tensorflow
result = int(tensorflow.reduce_sum(tensorflow.ones([2, 2])))
print(json.dumps([tensorflow.__version__, time.monotonic() - began_s, result]))
"""
_KERNELS: Final = """
import json, time
began_s = time.monotonic()
import numpy as np
from dlion_core.codecs import SelectedEntries, ValueCodec, decode_gradient, encode_selected
value_D = np.zeros(10_000, np.float32)
value_D[::100] = 1.0
cut_L = np.ones(1, np.float32).view(np.uint32)
selected = SelectedEntries(value_D, np.array([value_D.size]), cut_L, 100, 1.0)
sum_D = np.zeros_like(value_D)
payload = encode_selected(selected, ValueCodec.FLOAT16)
decode_gradient(payload, value_D.size).add_to(sum_D, np.float32(2.0))
print(json.dumps([bool((sum_D == 2 * value_D).all()), time.monotonic() - began_s]))
"""


def software_checks() -> list[TimedCheck]:
    """The checks, which have not run yet."""
    return [
        TimedCheck(MACHINE, "python", python_check),
        *(
            TimedCheck(MACHINE, f"packages of {extra}", partial(packages_check, extra))
            for extra in _NEEDED_FOR
        ),
        TimedCheck(
            MACHINE, "tensorflow", tensorflow_check, CheckOutcome.WARN,
            "Its import is slow: repeat on a quiet machine, and check the disk",
        ),
        TimedCheck(
            MACHINE, "kernels", kernels_check, CheckOutcome.WARN,
            "They are compiled where no cache has them: repeat the command",
        ),
        TimedCheck(MACHINE, "kernel cache", cache_check),
    ]  # fmt: skip


def python_check(version: str = "", required: str = "") -> Check:
    """Whether this interpreter is supported."""
    version = version or platform.python_version()
    required = required or str(metadata.metadata("dlion")["Requires-Python"])
    observed = f"{version} at {sys.executable}; supported: {required}"
    if SpecifierSet(required).contains(version, prereleases=True):
        return Check(MACHINE, "python", CheckOutcome.OK, observed)
    advice = "Make a virtual environment with a supported Python, and install dlion there"
    return Check(MACHINE, "python", CheckOutcome.FAIL, observed, advice)


def packages_check(extra: str, lines: Sequence[str] | None = None) -> Check:
    """Whether the packages of that extra are there, in supported versions.

    `lines`: requirements instead of those of the installed distribution.
    """
    name = f"packages of {extra}"
    given = metadata.requires("dlion") or [] if lines is None else lines
    problems, count = [], 0
    for requirement in _requirements(given, extra):
        count += 1
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    if not problems:
        return Check(MACHINE, name, CheckOutcome.OK, f"{count} packages in supported versions")
    if len(problems) == count or _is_absent(extra):
        observed = f"the extra is not installed ({', '.join(problems[:3])})"
        advice = f"Needed for {_NEEDED_FOR[extra]} only. {install_advice(extra)}"
        return Check(MACHINE, name, CheckOutcome.WARN, observed, advice)
    return Check(MACHINE, name, CheckOutcome.FAIL, "; ".join(problems), install_advice(extra))


def _requirements(lines: Sequence[str], extra: str) -> list[Requirement]:
    """The requirements of the extra alone, on this platform."""
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found


def _is_absent(extra: str) -> bool:
    """Whether the extra's main package is missing; others may be there for other reasons."""
    main = {"worker": "tensorflow", "cluster": "kubernetes"}[extra]
    return importlib.util.find_spec(main) is None


def tensorflow_check(code: str = _TENSORFLOW) -> Check:
    """Whether TensorFlow can be imported and computes; `code` is what is run."""
    if importlib.util.find_spec("tensorflow") is None:
        return _not_checked("tensorflow", "is not installed")
    done = run_python(code)
    try:
        version, took_s, result = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return _failed_import("tensorflow", done)
    figures = {"import_s": float(took_s)}
    observed = f"{version}, imported in {took_s:.1f} s"
    if result != 4:
        observed += f", and computes 2 + 2 = {result}"
        return Check(MACHINE, "tensorflow", CheckOutcome.FAIL, observed, "Reinstall it", figures)
    return Check(MACHINE, "tensorflow", CheckOutcome.OK, observed, figures=figures)


def kernels_check(code: str = _KERNELS) -> Check:
    """Whether the compiled kernels of the codecs work; `code` is what is run."""
    if importlib.util.find_spec("numba") is None:
        return _not_checked("kernels", "need numba, which is not installed")
    done = run_python(code)
    try:
        is_right, took_s = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return _failed_import("kernels", done)
    if not is_right:
        advice = "Remove numba's cache (__pycache__ in dlion_core/codecs, $NUMBA_CACHE_DIR)"
        return Check(MACHINE, "kernels", CheckOutcome.FAIL, "decode to other values", advice)
    observed = f"a gradient is encoded and decoded; ready in {took_s:.1f} s"
    return Check(MACHINE, "kernels", CheckOutcome.OK, observed, figures={"ready_s": float(took_s)})


def _not_checked(name: str, why: str) -> Check:
    return Check(MACHINE, name, CheckOutcome.UNKNOWN, why, install_advice("worker"))


def _failed_import(name: str, done: subprocess.CompletedProcess[str]) -> Check:
    if done.returncode == -signal.SIGILL:
        observed = "ends with an illegal instruction: this CPU lacks one that it was built for"
        advice = "Use a machine with AVX, or a TensorFlow that is built for this CPU"
    elif done.returncode < 0:
        observed = f"ends by signal {-done.returncode}"
        advice = "Check the memory (dmesg), and reinstall it"
    else:
        observed, advice = last_line(done), install_advice("worker")
    return Check(MACHINE, name, CheckOutcome.FAIL, observed, advice)


def cache_check(places: Sequence[Path] | None = None) -> Check:
    """Whether compiled kernels can be kept, so that processes start quickly.

    `places`: where they may be kept; by default where numba would keep them.
    """
    places = _cache_places() if places is None else places
    for place in places:
        existing = next((each for each in (place, *place.parents) if each.exists()), place)
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            return Check(MACHINE, "kernel cache", CheckOutcome.OK, f"{place} is writable")
    observed = f"none of {', '.join(map(str, places))} is writable: each process compiles"
    advice = "Set NUMBA_CACHE_DIR to a writable folder"
    return Check(MACHINE, "kernel cache", CheckOutcome.WARN, observed, advice)


def _cache_places() -> list[Path]:
    chosen, spec = os.environ.get("NUMBA_CACHE_DIR"), importlib.util.find_spec("dlion_core")
    folders = (spec and spec.submodule_search_locations) or []
    beside = [Path(folder) / "codecs" / "__pycache__" for folder in folders]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return [*([Path(chosen)] if chosen else []), *beside, home / "numba"]

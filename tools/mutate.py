"""Plant faults in a copy of this repository, one at a time, and find the tests that detect them.

    python tools/mutate.py [--only NAME] [-j 2] [-o json]

`tools/faults/*.toml` has the faults. Each one names a module, a text that occurs there once, its
replacement, and the tests nearest to it. These run as `make unit` runs them. If they pass, the
fault's `wider` tests run, which are those of simulated jobs or real processes: only `make test`
detects such a fault.

The exit code is 1 if a fault survives, if its text is missing (for example after a change of the
module), or if its tests fail without it.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).resolve().parent / "faults"
SOURCES = ("api", "operator", "worker", "cli")
EXAMPLES = "DLION_TEST_EXAMPLES"
UNIT_EXAMPLES = "0.25"
"""The value of `make unit` and `make test`."""
TESTS_FAILED, TIMEOUT_S, TEST_TIMEOUT_S = 1, 900, 120
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py)(?:::(.+?))?(?: - .*)?$", re.MULTILINE)


class Verdict(StrEnum):
    """The result of a fault."""

    UNIT = "unit"
    """Caught by `make unit`."""
    WIDER = "wider"
    """Caught only by `make test`."""
    SURVIVED = "survived"
    UNJUDGED = "not judged"


@dataclass(frozen=True)
class Fault:
    """A text of a module, its replacement, and the tests that must then fail."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]
    wider: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """The verdict on one fault, and the test that failed or why there is none."""

    name: str
    module: str
    verdict: Verdict
    by: str
    seconds: float = 0.0


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """Return all faults, by file and order. Raises: ValueError for a repeated name."""
    faults: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            if name in faults:
                raise ValueError(f"{path.name}: there is another fault {name!r}")
            tests, wider = tuple(fields.pop("tests")), tuple(fields.pop("wider", ()))
            faults[name] = Fault(name, tests=tests, wider=wider, **fields)
    return list(faults.values())


def file_of(module: str, root: Path) -> Path | None:
    """Return the file of a module below the source roots of `root`."""
    path = Path(*module.split("."))
    names = (path.with_suffix(".py"), path / "__init__.py")
    found = (root / source / name for source in SOURCES for name in names)
    return next((each for each in found if each.is_file()), None)


def stale(fault: Fault, root: Path = ROOT) -> str:
    """Return why the fault cannot be planted in the present code; empty if it can."""
    path = file_of(fault.module, root)
    if path is None:
        return f"no module {fault.module}"
    if (count := path.read_text().count(fault.old)) != 1:
        return f"its text occurs {count} times in {fault.module}, not once"
    missing = [test for test in (*fault.tests, *fault.wider) if not (root / test).exists()]
    return f"no {', '.join(missing)}" if missing else ""


class Tree:
    """A copy of the repository whose tests can be run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._planted = 0

    @classmethod
    def copy(cls, root: Path) -> Tree:
        """Copy what git tracks or would track, and compiled kernels, which take long to compile."""
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout
        names = [Path(name) for name in tracked.decode().split("\0") if name]
        kernels = [path.relative_to(ROOT) for path in ROOT.glob("worker/**/__pycache__/*.nb?")]
        for name in (*names, *kernels):
            if (ROOT / name).is_file() or (ROOT / name).is_symlink():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
        if (ROOT / ".venv").exists():
            (root / ".venv").symlink_to((ROOT / ".venv").resolve())
        return cls(root)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant that fault, and restore the module at the end."""
        path = file_of(fault.module, self.root)
        assert path is not None
        text, times = path.read_text(), path.stat()
        self._planted += 1
        later_ns = times.st_mtime_ns + self._planted * 10**9  # otherwise old bytecode is valid
        path.write_text(text.replace(fault.old, fault.new))
        os.utime(path, ns=(later_ns, later_ns))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Iterable[str], *options: str) -> subprocess.CompletedProcess[str] | None:
        """Run these tests; None after a time-out."""
        sources = [str(self.root / source) for source in SOURCES]
        limits = [f"--timeout={TEST_TIMEOUT_S}", "-m", "not measured and not slow"]
        try:
            return subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *limits, *options, *tests],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), EXAMPLES: UNIT_EXAMPLES},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None


def failing_files(tree: Tree, faults: Sequence[Fault]) -> dict[str, str]:
    """Return files of the nearest tests that fail without any fault, with a failing test."""
    tests = sorted({test for fault in faults for test in fault.tests})
    run = tree.run(tests)
    if run is None:
        return dict.fromkeys(tests, "the tests do not end")
    failed = dict(FAILED_TEST.findall(run.stdout))
    if run.returncode and not failed:
        return dict.fromkeys(tests, f"pytest ends with {run.returncode}")
    return failed


def judge(tree: Tree, fault: Fault, failing: dict[str, str]) -> Finding:
    """Plant one fault and run its tests. `failing`: files whose tests fail without it."""
    began_s = time.monotonic()

    def finding(verdict: Verdict, by: str) -> Finding:
        return Finding(fault.name, fault.module, verdict, by, round(time.monotonic() - began_s, 1))

    if problem := stale(fault, tree.root):
        return finding(Verdict.UNJUDGED, problem)
    for file, test in failing.items():
        if any(file == each or file.startswith(f"{each}/") for each in fault.tests):
            return finding(Verdict.UNJUDGED, f"{file} fails without the fault ({test})")
    with tree.planted(fault):
        for verdict, tests in ((Verdict.UNIT, fault.tests), (Verdict.WIDER, fault.wider)):
            if not tests:
                break
            run = tree.run(tests, "-x")
            if run is None:
                return finding(verdict, "the tests do not end")
            if run.returncode == TESTS_FAILED and (failed := FAILED_TEST.findall(run.stdout)):
                return finding(verdict, failed[0][1] or failed[0][0])
            if run.returncode not in (0, TESTS_FAILED):
                last = run.stdout.strip().rpartition("\n")[2]
                return finding(Verdict.UNJUDGED, f"pytest ends with {run.returncode}: {last}")
    return finding(Verdict.SURVIVED, "")


def judge_all(faults: Sequence[Fault], jobs: int, progress: bool) -> list[Finding]:
    """Return the findings on these faults in their order."""
    with tempfile.TemporaryDirectory(prefix="dlion-mutate-") as temporary:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        first = Tree.copy(Path(temporary) / "0")
        trees.put(first)
        failing = failing_files(first, faults)
        for number in range(1, jobs):
            trees.put(Tree.copy(Path(temporary) / str(number)))

        def one(fault: Fault) -> Finding:
            tree = trees.get()
            try:
                found = judge(tree, fault, failing)
            finally:
                trees.put(tree)
            if progress:
                print(line(found), file=sys.stderr, flush=True)
            return found

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, faults))


def line(found: Finding) -> str:
    """Return one row of the table."""
    return f"{found.verdict:10} {found.seconds:6.1f} s  {found.name:45} {found.by[:80]}"


def summary(findings: Sequence[Finding]) -> dict[str, object]:
    """Count the faults by verdict, and the share that each command detects."""
    count = {each: sum(found.verdict is each for found in findings) for each in Verdict}
    total = len(findings) or 1
    return {
        "faults": len(findings),
        **{verdict.replace(" ", "_"): number for verdict, number in count.items()},
        "caught_by_unit_fraction": round(count[Verdict.UNIT] / total, 3),
        "caught_fraction": round((count[Verdict.UNIT] + count[Verdict.WIDER]) / total, 3),
    }


def main() -> int:
    """Print a table or JSON, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="may be given again"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="copies to test in at a time")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    faults = read_faults()
    if unknown := set(arguments.only) - {fault.name for fault in faults}:
        parser.error(f"no fault {', '.join(sorted(unknown))}; see tools/faults")
    faults = [each for each in faults if each.name in arguments.only or not arguments.only]
    findings = judge_all(faults, arguments.jobs, progress=True)
    totals = summary(findings)
    if arguments.output == "json":
        print(json.dumps({**totals, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        print("\n".join(map(line, findings)))
        print(", ".join(f"{name} {number}" for name, number in totals.items()))
    return 0 if totals["unit"] + totals["wider"] == len(faults) else 1  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())

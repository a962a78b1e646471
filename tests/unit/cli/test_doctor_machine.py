"""Test the checks of `dlion doctor` for this machine and for faulty ones.

- Versions of Python and packages are compared with the requirements of the distribution. A missing
  extra is a warning.
- A crash, an illegal instruction and a wrong result of an interpreter are distinguished. CPU,
  quota, memory and disks have their limits.
- A check that raises or does not end affects no other, and its process ends with the command.

Left out: TensorFlow and the kernels themselves (tests/local/test_doctor.py), clusters
(test_doctor_cluster.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dlion_api.errors import UnavailableError
from dlion_cli.preflight_checks.checks import Check, CheckOutcome
from dlion_cli.preflight_checks.machine_checks import (
    cpu_check,
    disk_check,
    emulation_check,
    loopback_check,
    memory_check,
)
from dlion_cli.preflight_checks.software_checks import (
    cache_check,
    kernels_check,
    packages_check,
    python_check,
    tensorflow_check,
)
from dlion_cli.preflight_checks.timed_checks import TimedCheck, run_checks
from throttled_disk import throttled_disk

OK, WARN, FAIL, UNKNOWN = CheckOutcome


@pytest.mark.parametrize(
    ("version", "outcome"), [("", OK), ("3.11.0", OK), ("3.10.14", FAIL), ("3.15.0rc1", OK)]
)
def test_python_is_compared_with_the_requirement(version: str, outcome: CheckOutcome) -> None:
    check = python_check(version)
    assert check.outcome is outcome
    assert ">=3.11" in check.observed


@pytest.mark.parametrize(
    ("lines", "outcome", "words"),
    [
        (["click>=8; extra == 'worker'"], OK, "1 packages"),
        (["click>=999; extra == 'worker'", "rich>=1; extra == 'worker'"], FAIL,
         "instead of >=999"),
        (["no-such-dist>=1; extra == 'worker'", "rich; extra == 'worker'"], FAIL,
         "no-such-dist is missing"),
        (["no-such-dist>=1; extra == 'worker'"], WARN, "the extra is not installed"),
        (["no-such-dist>=1; extra == 'cluster'", "other-dist>=1", "nonsense ;;"], OK, "0 packages"),
        (["no-such-dist; extra == 'worker' and platform_machine == 'vax'"], OK, "0 packages"),
    ],
)  # fmt: skip
def test_packages_are_compared_with_the_extra(
    lines: list[str], outcome: CheckOutcome, words: str
) -> None:
    check = packages_check("worker", lines)
    assert (check.outcome, words in check.observed) == (outcome, True), check
    assert outcome is OK or "pip install" in check.advice


@pytest.mark.parametrize("extra", ["worker", "cluster"])
def test_the_packages_of_this_environment_pass(extra: str) -> None:
    assert packages_check(extra).outcome is OK


@pytest.mark.parametrize(
    ("code", "outcome", "words"),
    [
        ("print('noise'); print('[\"2.99\", 1.5, 4]')", OK, "2.99, imported in 1.5 s"),
        ("print('[\"2.99\", 1.5, 5]')", FAIL, "computes 2 + 2 = 5"),
        ("import absent_package", FAIL, "No module named 'absent_package'"),
        ("import os; os.kill(os.getpid(), 4)", FAIL, "illegal instruction"),
        ("import os; os.kill(os.getpid(), 9)", FAIL, "ends by signal 9"),
        ("raise SystemExit(3)", FAIL, "exit code 3"),
        ("print('{}')", FAIL, "exit code 0"),
    ],
)
def test_each_end_of_an_import_has_its_message(
    code: str, outcome: CheckOutcome, words: str
) -> None:
    check = tensorflow_check(code)
    assert (check.outcome, words in check.observed) == (outcome, True), check
    assert outcome is OK or check.advice


def test_wrong_kernels_are_reported() -> None:
    check = kernels_check("print('[false, 1.0]')")
    assert check.outcome is FAIL
    assert "NUMBA_CACHE_DIR" in check.advice


def test_a_cache_is_writable_or_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable, usable = tmp_path / "file" / "numba", tmp_path / "a" / "b"
    assert cache_check([unusable, usable]).observed == f"{usable} is writable"
    assert cache_check([unusable]).outcome is WARN
    assert not usable.exists(), "nothing is created"


def machine(folder: Path, **files: str) -> Path:
    """Return a root with these files; `_` is `/` in their names, and `..` is `_`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FULL = "flags\t\t: fpu avx avx2 fma\n"


@pytest.mark.parametrize(
    ("flags", "outcome", "words"),
    [
        (FULL, OK, "cores"),
        ("flags : fpu avx\n", WARN, "without avx2, fma"),
        ("flags : fpu\n", FAIL, "without avx"),
        ("no flags", OK, "cores"),
    ],
)
def test_the_instructions_of_the_cpu_are_known(
    tmp_path: Path, flags: str, outcome: CheckOutcome, words: str
) -> None:
    check = cpu_check(machine(tmp_path, proc__cpuinfo=flags), "x86_64")
    assert (check.outcome, words in check.observed) == (outcome, True), check
    assert cpu_check(machine(tmp_path, proc__cpuinfo=flags), "aarch64").outcome is OK


def test_a_quota_below_one_core_is_a_warning(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__cpuinfo=FULL, proc__self__cgroup="0::/pod\n")
    group = tmp_path / "sys" / "fs" / "cgroup" / "pod"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("50000 100000")
    check = cpu_check(root, "x86_64")
    assert (check.outcome, check.figures["usable_cores"]) == (WARN, 0.5)
    assert "a quota leaves 0.5" in check.observed


@pytest.mark.parametrize(
    ("available_kb", "limit", "outcome"),
    [(4_000_000, "max", OK), (1_000_000, "max", WARN), (100_000, "max", FAIL),
     (4_000_000, "268435456", FAIL), (4_000_000, "1073741824", WARN)],
)  # fmt: skip
def test_memory_has_its_limits(
    tmp_path: Path, available_kb: int, limit: str, outcome: CheckOutcome
) -> None:
    meminfo = f"MemTotal: 8000000 kB\nMemAvailable: {available_kb} kB\n"
    root = machine(tmp_path, proc__meminfo=meminfo, proc__self__cgroup="0::/pod\n")
    group = tmp_path / "sys" / "fs" / "cgroup" / "pod"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit)
    assert memory_check(root).outcome is outcome
    assert memory_check(tmp_path / "absent").outcome is UNKNOWN


def test_folders_without_write_access_are_reported(tmp_path: Path) -> None:
    assert disk_check("disk", tmp_path).outcome in (OK, WARN)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "absent", Path("/proc")):
        check = disk_check("disk", folder)
        assert check.outcome is FAIL, folder
        assert str(folder) in check.observed


@pytest.mark.root
def test_the_file_that_is_written_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends without a check that is late, and could not delete its file."""
    listed: list[list[Path]] = []
    monkeypatch.setattr(os, "fsync", lambda _: listed.append([*tmp_path.iterdir()]))
    disk_check("disk", tmp_path)
    assert listed
    assert not any(listed)


def test_a_full_disk_fails_and_a_small_one_is_a_warning(tmp_path: Path) -> None:
    for size, outcome in (("128k", FAIL), ("200m", WARN)):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(tmp_path)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a file system")
        try:
            assert disk_check("disk", tmp_path).outcome is outcome
        finally:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.root
def test_a_slow_disk_is_a_warning(tmp_path: Path) -> None:
    with throttled_disk(tmp_path, 1_000_000) as wrapper:
        code = (
            "import json, sys; from pathlib import Path;"
            "from dlion_cli.preflight_checks.machine_checks import disk_check;"
            "print(json.dumps(disk_check('disk', Path(sys.argv[1])).as_json()))"
        )
        command = [*wrapper, sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    check = json.loads(done.stdout)
    assert (check["outcome"], "which is slow" in check["observed"]) == ("warn", True), check
    assert check["figures"]["written_bytes_per_s"] < 2e6
    assert "take another disk" in check["advice"]


def test_the_loopback_interface_is_tried() -> None:
    assert loopback_check().outcome is OK
    assert loopback_check("192.0.2.1").outcome is FAIL  # an address of no interface


def test_missing_tools_for_emulation_are_not_a_failure() -> None:
    assert emulation_check().outcome in (OK, WARN)


def test_one_check_affects_no_other() -> None:
    release = threading.Event()

    def raises() -> Check:
        raise UnavailableError("something is away")

    def never_ends() -> Check:
        release.wait()
        return Check("here", "late", OK, "too late")

    def good() -> Check:
        return Check("here", "good", OK, "fine")

    checks = [
        TimedCheck("here", "late", never_ends, WARN, "wait longer"),
        TimedCheck("here", "raises", raises),
        TimedCheck("here", "good", good),
        TimedCheck("here", "later", never_ends),
    ]
    began_s = time.monotonic()
    late, raised, fine, later = run_checks(checks, 1.5)
    release.set()
    assert time.monotonic() - began_s < 5.0
    assert (late.outcome, late.advice) == (WARN, "wait longer")
    assert late.observed == "no result within 1.5 s"
    assert (raised.outcome, raised.observed) == (FAIL, "something is away")
    assert (fine.outcome, later.outcome) == (OK, FAIL)


def test_an_interpreter_ends_with_the_command(tmp_path: Path) -> None:
    """Also if the command is killed: no process stays."""
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"from dlion_cli.preflight_checks.timed_checks import run_python; run_python({child!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as command:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        pid = int(pid_file.read_text())
        command.send_signal(signal.SIGKILL)
        command.wait(timeout=10)
    end_s = time.monotonic() + 10.0
    with suppress(ProcessLookupError):
        while time.monotonic() < end_s:
            os.kill(pid, 0)
            time.sleep(0.05)
        pytest.fail("the interpreter continues")

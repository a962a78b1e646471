"""Test install.sh of a bundle.

- It refuses wrong arguments (2), and a bundle that is changed, truncated or of another architecture
  (66). It refuses a machine without a program or a cluster (69), and a full disk (74). The message
  names the remedy. It has then called nothing that changes the machine, and states this.
- After a failure or an interrupt (130) in the middle it prints the finished steps, and the next run
  continues.
- It works with dash and busybox, from a folder with spaces in its name. shellcheck finds nothing.

helm, kubectl and ctr are stand-ins that record their calls. Images, chart and cluster are real in
tests/cluster/test_bundle.py.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from small_bundle import extracted, facts_of, write_small_bundle

ROOT = Path(__file__).parents[3]
TOOLS = (
    "sh", "cat", "chmod", "cp", "df", "dirname", "grep", "id", "ln", "mkdir", "mktemp", "rm", "sed",
    "sha256sum", "sleep", "tar", "touch", "uname", "wc",
)  # fmt: skip
USAGE, DATA, UNAVAILABLE, STORAGE = 2, 66, 69, 74
CALLED = 'echo "$(basename "$0") $*" >>"$CALLS"\n'
STAND_INS = {
    "helm": """if [ "$1" = status ]; then
  [ ! -e "$CALLS.state" ] || echo "STATUS: $(cat "$CALLS.state")"; exit
fi
cat >/dev/null
[ -z "${HELM_LEAVES:-}" ] || echo "$HELM_LEAVES" >"$CALLS.state"
[ -z "${HELM_FAILS:-}" ] || { echo "Error: $HELM_FAILS" >&2; exit 1; }
""",
    "kubectl": 'case "$*" in *nodes*) echo "${NODES-amd64/n0 }" ;; esac\n',
    # It lists its arguments.
    "ctr": """case "$*" in
  *version*) exit "${CTR_VERSION:-0}" ;;
  *import*) [ -z "${CTR_WAITS:-}" ] || exec sleep 60
    [ -z "${CTR_FAILS:-}" ] || { echo "ctr: $CTR_FAILS" >&2; exit 1; }
    for file in "$@"; do :; done; name=${file##*/}; touch "$CALLS.${name%.tar}" ;;
  *ls*) for t in operator sidecar worker; do
      case "$*" in *dlion-$t:*) [ ! -e "$CALLS.$t" ] ||
        sed -n "s|^$t.digest: \\(.*\\)|localhost/dlion-$t:0.1.0 type \\1 1B|p" "$FACTS" ;; esac
    done ;;
esac
""",
}  # fmt: skip
pytestmark = pytest.mark.skipif(
    platform.machine() not in {"x86_64", "aarch64"}, reason="there are no images for this machine"
)
HERE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "")
OTHER = {"amd64": "arm64", "arm64": "amd64"}.get(HERE, "")


@dataclass
class Scene:
    """The folder of a bundle, and a PATH that holds only the given programs."""

    folder: Path
    bin: Path
    calls: Path
    shell: tuple[str, ...] = ("sh",)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run install.sh in another folder."""
        return subprocess.run(
            [*self.shell, str(self.folder / "install.sh"), *arguments],
            env=self.environment(environment), cwd=self.bin.parent, timeout=60,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        """Return the environment of the stand-ins."""
        return {
            "PATH": str(self.bin), "CALLS": str(self.calls), "HOME": str(self.bin.parent),
            "FACTS": str(self.folder / "bundle.yaml"), "NODES": f"{HERE}/n0 ",
        } | more  # fmt: skip

    @property
    def changes(self) -> list[str]:
        """Return the calls that would change something."""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        words = ("import", "label", "upgrade", "apply", "push")
        changing = [call for call in calls if any(word in call.split() for word in words)]
        return [call for call in changing if not call.endswith("--dry-run")]

    def refuses(
        self, code: int, problem: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Check that it ends with this code and message, and has changed nothing."""
        done = self.run(*arguments, **environment)
        assert problem in done.stderr, done
        assert done.returncode == code
        assert self.changes == []
        return done


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_bundle(tmp_path_factory.mktemp("bundle"), f"linux/{HERE}")


@pytest.fixture(params=["sh", "busybox"])
def scene(bundle: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    """Return a scene with all stand-ins, with `sh` of Debian and with busybox and its tools."""
    found = Scene(
        extracted(bundle, tmp_path / "a folder, with spaces"), tmp_path / "bin", tmp_path / "calls"
    )
    found.bin.mkdir()
    if request.param == "busybox":
        busybox = shutil.which("busybox")
        if busybox is None:
            pytest.skip("no busybox here")
        for name in (*TOOLS, "basename"):
            (found.bin / name).symlink_to(busybox)
        found.shell = (busybox, "sh")
    else:
        for name in (*TOOLS, "basename"):
            (found.bin / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    for name, text in STAND_INS.items():
        (found.bin / name).write_text(f"#!/bin/sh\n{CALLED}{text}")
        (found.bin / name).chmod(0o755)
    return found


SITE = ("--site", "plant-a")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--site is missing"),
        (["--site"], "--site needs a value"),
        (["--site", ""], "--site needs a value, not ''"),
        (["--site="], "--site needs a value, not ''"),
        (["--site", "--dry-run"], "--site needs a value, not '--dry-run'"),
        (["--site", "Plant_A"], "--site 'Plant_A'"),
        (["--site", "plant a"], "--site 'plant a'"),
        (["--site", "-a"], "--site needs a value"),
        (["--site", "a-"], "--site 'a-'"),
        (["--site", "$(touch x)"], "--site '$(touch x)'"),
        (["--site", "a\nb"], "--site 'a"),
        (["--site", "a" * 41], "at most 40"),
        (["--site", "ä"], "--site 'ä'"),
        ([*SITE, "--namespace", "../x"], "--namespace '../x'"),
        ([*SITE, "--namespace", "n" * 64], "at most 63"),
        ([*SITE, "--release", "a b"], "--release 'a b'"),
        ([*SITE, "--timeout", "soon"], "--timeout 'soon'"),
        ([*SITE, "--timeout", "0"], "--timeout '0'"),
        ([*SITE, "--timeout", "100000"], "--timeout '100000'"),
        ([*SITE, "--kubeconfig", "/nowhere/x y"], "--kubeconfig '/nowhere/x y': no readable file"),
        ([*SITE, "--registry", "https://r.example/x"], "without https://"),
        ([*SITE, "--registry", "/"], "HOST[:PORT]/PATH"),
        ([*SITE, "--registry", "r.example/a b"], "HOST[:PORT]/PATH"),
        ([*SITE, "--registry", "r.example/x:1.0/y:2"], "HOST[:PORT]/PATH"),
        ([*SITE, "--registry", "r.example/x@sha256"], "HOST[:PORT]/PATH"),
        ([*SITE, "--registry", "r" * 201], "more than 200"),
        ([*SITE, "--insecure-registry"], "--insecure-registry needs --registry"),
        ([*SITE, "extra"], "unknown argument 'extra'; arguments for helm stand after --"),
        ([*SITE, "--set", "x=1"], "unknown argument '--set'"),
        ([*SITE, "--", "-f", "-"], "values from standard input"),
        ([*SITE, "--", "--values=-"], "values from standard input"),
        ([*SITE, "--", "-f=-"], "values from standard input"),
        ([*SITE, "--", "-nother"], "'-nother' stands before --"),
        ([*SITE, "--", "--namespace", "x"], "'--namespace' stands before --"),
        ([*SITE, "--", "--dry-run"], "'--dry-run' stands before --"),
        (["--images-only", "--skip-images"], "exclude each other"),
        (["--images-only", "--", "--wait"], "runs no helm"),
    ],
)
def test_wrong_arguments_are_refused(scene: Scene, arguments: list[str], problem: str) -> None:
    scene.refuses(USAGE, problem, *arguments)
    assert not scene.calls.exists()
    assert not (scene.bin.parent / "x").exists()


def test_help_teaches_by_examples_and_needs_nothing(scene: Scene) -> None:
    shutil.rmtree(scene.folder / "images")
    done = scene.run("--help")
    assert done.returncode == 0
    assert "sudo sh install.sh --site plant-a" in done.stdout
    assert not scene.calls.exists()


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "images/worker.tar": lambda folder: cut(folder / "images/worker.tar"),
    "images/sidecar.tar": lambda folder: (folder / "images/sidecar.tar").unlink(),
    "bundle.yaml": lambda folder: append(folder / "bundle.yaml", "version: 9\n"),
    "charts/dlion-0.1.0.tgz": lambda folder: (folder / "charts/dlion-0.1.0.tgz").write_bytes(b"x"),
    "no checksums.txt": lambda folder: (folder / "checksums.txt").unlink(),
    "lacks": lambda folder: (folder / "checksums.txt").write_text(
        "\n".join((folder / "checksums.txt").read_text().splitlines()[:4]) + "\n"
    ),
    "is damaged": lambda folder: append(folder / "checksums.txt", "0123  ../../etc/passwd\n"),
    "checksums.txt in": lambda folder: (folder / "checksums.txt").write_bytes(b"\0\xff\n"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_changed_or_truncated_bundle_is_refused(scene: Scene, damage: str) -> None:
    DAMAGE[damage](scene.folder)
    done = scene.refuses(DATA, damage, *SITE)
    assert "extract the archive again" in done.stderr
    assert "nothing was changed" in done.stderr
    assert not scene.calls.exists()


def test_an_incomplete_download_is_refused(scene: Scene, bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) * 2 // 3])
    (tmp_path / "cut").mkdir()
    subprocess.run(
        ["tar", "-xf", tmp_path / "cut.tar", "-C", tmp_path / "cut"], capture_output=True
    )
    (scene.folder,) = (tmp_path / "cut").iterdir()
    shutil.copy(ROOT / "tools/bundle/install.sh", scene.folder)
    scene.refuses(DATA, "not complete", *SITE)


def test_a_bundle_of_another_architecture_is_refused(scene: Scene, tmp_path: Path) -> None:
    foreign = write_small_bundle(tmp_path / "foreign", f"linux/{OTHER}")
    assert foreign.stem.endswith(f"-{OTHER}")
    scene.folder = extracted(foreign, tmp_path / "foreign out")
    scene.refuses(DATA, "no node of the cluster is; take the bundle", *SITE)
    scene.refuses(DATA, f"this node is linux/{HERE}", "--images-only")
    scene.refuses(DATA, f"this node is linux/{HERE}", *SITE, NODES=f"{OTHER}/n0 ")
    done = scene.run(*SITE, "--skip-images", "--dry-run", NODES=f"{HERE}/n0 {OTHER}/n1 ")
    assert done.returncode == 0
    assert done.stdout.splitlines()[2].endswith("from this bundle: n0")


@pytest.mark.parametrize(
    ("program", "arguments", "problem"),
    [
        ("helm", SITE, "no helm on the PATH: copy the program"),
        ("kubectl", SITE, "no kubectl on the PATH: copy the program"),
        ("ctr", SITE, "no containerd here"),
        ("ctr", ["--images-only"], "or give --registry"),
    ],
)
def test_a_missing_program_is_named_with_the_remedy(
    scene: Scene, program: str, arguments: list[str], problem: str
) -> None:
    (scene.bin / program).unlink()
    done = scene.refuses(UNAVAILABLE, problem, *arguments)
    assert "nothing was changed" in done.stderr


def test_a_program_that_does_not_answer_is_named(scene: Scene) -> None:
    scene.refuses(UNAVAILABLE, "run this as root, with sudo", "--images-only", CTR_VERSION="1")
    scene.refuses(UNAVAILABLE, "no skopeo, crane or podman", *SITE, "--registry=r.example/x")
    (scene.bin / "kubectl").write_text("#!/bin/sh\necho 'connection refused' >&2; exit 1\n")
    scene.refuses(UNAVAILABLE, "the cluster does not answer: connection refused", *SITE)


def test_a_dry_run_changes_nothing(scene: Scene) -> None:
    done = scene.run(*SITE, "--dry-run", "--", "--set", "keeper.size=1Gi")
    assert done.returncode == 0, done.stderr
    assert "Would run: ctr --namespace k8s.io images import" in done.stdout
    assert 'site: {name: "plant-a"}' in done.stdout
    assert "Nothing was changed (--dry-run)." in done.stdout
    assert scene.changes == []
    scene.refuses(UNAVAILABLE, "helm refuses it: Error: no", *SITE, "--dry-run", HELM_FAILS="no")


def test_a_failure_in_the_middle_prints_the_finished_steps(scene: Scene) -> None:
    done = scene.run(*SITE, HELM_FAILS="another operation (install) is in progress")
    assert done.returncode == UNAVAILABLE
    assert "NOT complete. Done so far:" in done.stderr
    for target in ("operator", "sidecar", "worker"):
        assert f"image {target}: imported on this node" in done.stderr
    assert "release dlion in namespace dlion-system: begun" in done.stderr
    assert "helm uninstall -n dlion-system dlion" in done.stderr
    again = scene.run(*SITE, "--", "-f", "my values.yaml")
    assert again.returncode == 0, again.stderr
    assert "This node has the images already (ctr)." in again.stdout
    labels = [call for call in scene.changes if "label" in call.split()]
    assert len(labels) == 6, "each run pins all three, as an earlier one may be incomplete"
    assert "DLion 0.1.0 runs as site plant-a." in again.stdout
    assert sum(" import " in call for call in scene.changes) == 3
    assert scene.changes[-1].endswith("--values - -f my values.yaml")


REPAIRS = [
    ("pending-install", "helm uninstall dlion --namespace dlion-system"),
    ("pending-upgrade", "helm rollback dlion --namespace dlion-system"),
    ("pending-rollback", "helm rollback dlion --namespace dlion-system"),
]


@pytest.mark.parametrize(("state", "command"), REPAIRS)
def test_an_earlier_interrupted_helm_is_reported_before_the_images(
    scene: Scene, state: str, command: str
) -> None:
    Path(f"{scene.calls}.state").write_text(state)
    for more in ((), ("--dry-run",)):
        done = scene.refuses(UNAVAILABLE, f"is {state}: a helm was broken off", *SITE, *more)
        assert (
            f"Once none runs: {command} --kube-context farm, and then"
            in scene.run(*SITE, "--context", "farm").stderr
        )
        assert "nothing was changed." in done.stderr


@pytest.mark.parametrize(("state", "command"), REPAIRS)
def test_an_interrupted_helm_is_reported_with_its_repair(
    scene: Scene, state: str, command: str
) -> None:
    done = scene.run(*SITE, HELM_FAILS="signal: killed", HELM_LEAVES=state)
    assert done.returncode == UNAVAILABLE
    end = f"First, once no helm runs: {command}\nThe same command continues from here.\n"
    assert done.stderr.endswith(end)


@pytest.mark.parametrize("state", ["deployed", "failed", "superseded"])
def test_a_release_in_another_state_is_installed(scene: Scene, state: str) -> None:
    Path(f"{scene.calls}.state").write_text(state)
    assert scene.run(*SITE).returncode == 0


@pytest.mark.parametrize(
    ("problem", "code", "advice"),
    [
        ("write blob: no space left on device", STORAGE, "the disk is full"),
        ("dial unix: permission denied", UNAVAILABLE, "run this as root"),
        ("unexpected EOF", UNAVAILABLE, "could not import images/operator.tar"),
    ],
)
def test_an_import_that_fails_is_not_a_success(
    scene: Scene, problem: str, code: int, advice: str
) -> None:
    done = scene.run(*SITE, CTR_FAILS=problem)
    assert done.returncode == code
    assert advice in done.stderr
    assert problem in done.stderr
    assert "image operator: the import was begun on this node" in done.stderr
    assert not any("upgrade" in call for call in scene.changes)


def sleeps(group: int) -> bool:
    """Return whether a process of that group runs `sleep`."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, fields = path.read_text().rpartition(") ")
            if name.endswith("(sleep") and int(fields.split()[2]) == group:
                return True
    return False


def test_an_interrupt_ends_it_and_prints_the_finished_steps(scene: Scene) -> None:
    started = subprocess.Popen(
        [*scene.shell, str(scene.folder / "install.sh"), "--images-only"],
        env=scene.environment({"CTR_WAITS": "yes"}), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, process_group=0,
    )  # fmt: skip
    deadline_s = time.monotonic() + 30
    # A shell can lose a signal between the fork and the exec of a program.
    while not sleeps(started.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, problem = started.communicate(timeout=30)
    assert started.returncode == 130
    assert "image operator: the import was begun on this node" in problem


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: run as root")
def test_a_disk_without_room_is_refused_before_anything_is_imported(scene: Scene) -> None:
    sizes = [int(v) for k, v in facts_of(scene.folder).items() if k.endswith("unpackedBytes")]
    assert sum(sizes) > 16_384
    mount = "mount -t tmpfs -o size=16k tmpfs /var/lib && mkdir /var/lib/containerd"
    script = f'PATH=/usr/bin:/bin; {mount} && PATH={scene.bin} exec "$@"'
    outer = [shutil.which("unshare") or "", "--mount", "/bin/sh", "-c", script, "sh"]
    scene.shell = (*outer, *(shutil.which(word) or word for word in scene.shell))
    scene.refuses(STORAGE, "/var/lib/containerd has 0 MB free; importing", "--images-only")


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("no shellcheck: install it (Debian: shellcheck)")
    done = subprocess.run(
        [program, ROOT / "tools/bundle/install.sh"], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
    assert done.returncode == 0

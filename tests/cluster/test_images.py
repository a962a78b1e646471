"""Test the images of the Dockerfile in pods of a namespace with pod security `restricted`.

They run as uid 65532 on a read-only root file system and write where they may. They have no
compiler and no pip; the small ones have no TensorFlow. All imports of their programs are present.
The codecs' machine code is loaded, not compiled. A training step and the digits work. SIGTERM ends
a process within two seconds. Sizes are within their bounds. The lock resolves with hashes for
64-bit ARM and for NVIDIA's GPUs.

Left out: images of other architectures and a GPU (nothing here runs them); the work of the programs
in a cluster (other tests of this folder).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from local_run import job_document
from testbed.project_images import ROOT, ProjectImage, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testbed.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.root, pytest.mark.timeout(900)]

UID = 65532
MAX_BYTES = {
    Target.OPERATOR: 350_000_000,
    Target.SIDECAR: 350_000_000,
    Target.WORKER: 1_550_000_000,
}
WRITABLE = ("/tmp", "/run/dlion", "/var/lib/dlion")
ROOTS = {
    Target.OPERATOR: ["dlion_api", "dlion_operator"],
    Target.SIDECAR: [
        "dlion_api",
        "dlion_core.resource_control",
        "dlion_core.topology",
        "dlion_worker.pod",
        "dlion_worker.sidecar",
    ],
    Target.WORKER: [
        "dlion_api",
        "dlion_core",
        "dlion_environments",
        "dlion_results",
        "dlion_worker",
    ],
}
PROGRAMS = [
    (Target.OPERATOR, ["--help"], "--config"),
    (Target.SIDECAR, ["sidecar", "--help"], "sidecar"),
    (Target.WORKER, ["trainer", "--help"], "trainer"),
    (Target.WORKER, ["keeper", "--help"], "keeper"),
]

SURROUNDINGS = """
import errno, importlib.util, json, os, shutil, sys
def answer(folder):
    try:
        open(os.path.join(folder, "probe"), "x").close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "written"
folders = ["/", "/etc", "/opt/dlion", *sys.argv[1:]]
print(json.dumps({
    "ids": [os.getuid(), os.getgid(), *os.getgroups()],
    "folders": {folder: answer(folder) for folder in folders},
    "tools": [name for name in ("pip", "pip3", "uv", "gcc", "cc", "ld", "strip", "make")
              if shutil.which(name)],
    "packages": [name for name in ("pip", "tensorflow", "keras", "numpy", "pytest", "dlion_cli",
                                   "dlion_operator", "dlion_worker")
                 if importlib.util.find_spec(name)],
    "sources": sum(name.endswith(".py") for _, _, names in os.walk("/opt/dlion") for name in names),
    "compiled": sum(name.endswith(".pyc") for _, _, names in os.walk("/opt/dlion")
                    for name in names),
}))
"""

IMPORTS = """
import importlib, json, pkgutil, sys
failed, count = {}, 0
for root in sys.argv[1:]:
    package = importlib.import_module(root)
    found = pkgutil.walk_packages(getattr(package, "__path__", []), root + ".", onerror=print)
    for module in found:
        if module.name.startswith("dlion_results.report"):
            continue  # drawn by the command line, outside of clusters
        try:
            importlib.import_module(module.name)
            count += 1
        except Exception as error:
            failed[module.name] = repr(error)
print(json.dumps({"failed": failed, "count": count, "tensorflow": "tensorflow" in sys.modules}))
"""

WORK = """
import json, time
began = time.monotonic()
import tensorflow as tf
import_s = time.monotonic() - began
from dlion_core.codecs import kernels, norms
from dlion_worker.training.datasets.named_datasets import digits
dispatchers = [kernels.peak_bits, kernels.count, kernels.add_blocks, norms.add_projection]
x, y = digits()
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)])
model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(x / 255.0, y, epochs=1, verbose=0)
model.save("/var/lib/dlion/model.keras")
again = tf.keras.models.load_model("/var/lib/dlion/model.keras")
print(json.dumps({
    "import_s": round(import_s, 1),
    "loss": float(history.history["loss"][0]),
    "samples": len(x),
    "hits": [sum(each.stats.cache_hits.values()) for each in dispatchers],
    "misses": [sum(each.stats.cache_misses.values()) for each in dispatchers],
}))
"""

WAITING = """
import os, sys
from dlion_api.names import Rank
from dlion_api.protocol.worker_config import WorkerConfig
open("/tmp/token", "w").write("none")
WorkerConfig(
    job_document=%(document)r, rank=Rank(0), coordinator_address="127.0.0.1:9",
    authority_pem_path="", token_path="/tmp/token", state_dir="/var/lib/dlion",
    socket_path="/run/dlion/s", listen_host="127.0.0.1", advertise_host="127.0.0.1",
    data_root="", results_dir="/var/lib/dlion",
).save("/tmp/config.json")
arguments = ["-m", "dlion_worker.sidecar", "--config", "/tmp/config.json"]
os.execv(sys.executable, [sys.executable, *arguments])
"""
DOCUMENT = job_document(1, tls={"mode": "Disabled"})


@pytest.fixture(scope="module")
def restricted(pods_cluster: Kubectl) -> Iterator[Kubectl]:
    """A namespace whose pods must be `restricted`."""
    kubectl = pods_cluster
    name = f"restricted-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    yield replace(kubectl, namespace=name)
    kubectl.run("delete", "namespace", name, "--wait=false")


def pod(image: ProjectImage, command: list[str] | None, arguments: list[str]) -> dict[str, Any]:
    """Return a pod like the operator's: `restricted`, with a read-only root file system."""
    container: dict[str, Any] = {
        "name": "main",
        "image": image.reference,
        "imagePullPolicy": "Never",
        "args": arguments,
        "resources": {"requests": {"memory": "64Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": f"v{number}", "mountPath": path} for number, path in enumerate(WRITABLE)
        ],
    }
    if command is not None:
        container["command"] = command
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": f"v{number}", "emptyDir": {}} for number in range(len(WRITABLE))],
        "terminationGracePeriodSeconds": 30,
    }
    metadata = {"name": f"{image.target}-{uuid.uuid4().hex[:8]}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def script(image: ProjectImage, text: str, *arguments: str) -> dict[str, Any]:
    """Return a pod that runs that script in the image's Python."""
    return pod(image, ["python", "-c", text], list(arguments))


@pytest.fixture(scope="module")
def pods(images: dict[Target, ProjectImage], restricted: Kubectl) -> dict[str, dict[str, Any]]:
    """Start all pods that wait for nothing at once, by their purpose."""
    made = {f"surroundings of {t}": script(images[t], SURROUNDINGS, *WRITABLE) for t in Target}
    made |= {f"imports of {t}": script(images[t], IMPORTS, *ROOTS[t]) for t in Target}
    made |= {f"help of {t} {words[0]}": pod(images[t], None, words) for t, words, _ in PROGRAMS}
    restricted.apply(*made.values())
    return made


def printed(kubectl: Kubectl, document: dict[str, Any]) -> str:
    """Return what the pod printed; start it if needed; it has to succeed."""
    name = document["metadata"]["name"]
    kubectl.apply(document)
    until_s = time.monotonic() + 180
    while (phase := kubectl.get("pod", name)["status"].get("phase")) not in {"Succeeded", "Failed"}:
        assert time.monotonic() < until_s, kubectl.run("describe", "pod", name)
        time.sleep(0.3)
    output = kubectl.run("logs", name)
    kubectl.run("delete", "pod", name, "--wait=false")
    assert phase == "Succeeded", output[-4000:]
    return output


def answer(kubectl: Kubectl, document: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document in the last line of the pod's output."""
    output = printed(kubectl, document)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("target", list(Target))
def test_an_image_is_within_its_size_bound(
    images: dict[Target, ProjectImage], target: Target
) -> None:
    size = images[target].unpacked_bytes
    print(f"{target}: {size / 1e6:.0f} MB unpacked")
    assert 50_000_000 < size < MAX_BYTES[target]


@pytest.mark.parametrize("target", list(Target))
def test_an_image_runs_restricted_and_has_only_what_it_needs(
    pods: dict[str, dict[str, Any]], restricted: Kubectl, target: Target
) -> None:
    found = answer(restricted, pods[f"surroundings of {target}"])
    assert set(found["ids"]) == {UID}
    assert found["folders"] == {
        **dict.fromkeys(("/", "/etc", "/opt/dlion"), "EROFS"),
        **dict.fromkeys(WRITABLE, "written"),
    }
    assert found["tools"] == []
    own = {Target.OPERATOR: {"dlion_operator"}, Target.SIDECAR: {"dlion_worker"}}
    everything = {"tensorflow", "keras", "numpy", "dlion_worker"}
    assert set(found["packages"]) == own.get(target, everything)
    assert found["compiled"] > 0.9 * found["sources"]


@pytest.mark.parametrize("target", list(Target))
def test_all_imports_of_the_programs_are_present(
    pods: dict[str, dict[str, Any]], restricted: Kubectl, target: Target
) -> None:
    found = answer(restricted, pods[f"imports of {target}"])
    assert found["failed"] == {}
    assert found["count"] > 20
    assert found["tensorflow"] == (target is Target.WORKER)


def test_the_worker_image_trains_and_compiles_nothing(
    images: dict[Target, ProjectImage], restricted: Kubectl
) -> None:
    found = answer(restricted, script(images[Target.WORKER], WORK))
    print(f"TensorFlow imported in {found['import_s']} s")
    assert found["samples"] == 1797
    assert 0 < found["loss"] < 10
    assert found["hits"] == [1] * 4
    assert found["misses"] == [0] * 4


@pytest.mark.parametrize(("target", "words", "text"), PROGRAMS)
def test_the_entry_point_is_the_program(
    pods: dict[str, dict[str, Any]],
    restricted: Kubectl,
    target: Target,
    words: list[str],
    text: str,
) -> None:
    assert text in printed(restricted, pods[f"help of {target} {words[0]}"])


def test_sigterm_ends_a_process_that_waits_for_its_coordinator(
    images: dict[Target, ProjectImage], restricted: Kubectl
) -> None:
    made = script(images[Target.SIDECAR], WAITING % {"document": DOCUMENT})
    name = made["metadata"]["name"]
    restricted.apply(made)
    restricted.wait("--for=jsonpath={.status.phase}=Running", f"pod/{name}")
    serving = time.monotonic() + 30
    probe = ["exec", name, "--", "python", "-c"]
    while "dlion_worker.sidecar" not in restricted.run(
        *probe, "print(open('/proc/1/cmdline').read())"
    ) or "True" not in restricted.run(*probe, "import os; print(os.path.exists('/run/dlion/s'))"):
        assert time.monotonic() < serving, restricted.run("logs", name)
        time.sleep(0.5)
    killed_s = float(
        restricted.run(*probe, "import os, time; print(time.time(), flush=True); os.kill(1, 15)")
    )
    restricted.wait("--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", timeout_s=20)
    state = restricted.get("pod", name)["status"]["containerStatuses"][0]["state"]["terminated"]
    ended_s = datetime.fromisoformat(state["finishedAt"]).timestamp()  # whole seconds, rounded down
    print(f"SIGTERM at {killed_s % 60:.1f} s, ended in the second from {ended_s % 60:.0f} s")
    assert ended_s - killed_s < 1
    restricted.run("delete", "pod", name, "--wait=false")


WORKER = ["--omit=click", "--omit=libclang"]


@pytest.mark.parametrize(
    ("extra", "platform", "options"),
    [
        ("operator", "aarch64-manylinux_2_28", ["--omit=click", "--omit=rich"]),
        ("sidecar", "aarch64-manylinux_2_28", ["--omit=click", "--omit=rich"]),
        ("worker", "aarch64-manylinux_2_28", WORKER),
        ("worker", "x86_64-manylinux_2_28", WORKER),
        (
            "worker",
            "x86_64-manylinux_2_28",
            [
                *WORKER,
                "--omit=tensorflow-cpu",
                "--lock=requirements.lock",
                "--lock=requirements-gpu.lock",
            ],
        ),
    ],
)
def test_packages_are_available_with_their_hashes(
    tmp_path: Path, extra: str, platform: str, options: list[str]
) -> None:
    """Ask the index for a wheel of each; build and install nothing."""
    tool = [sys.executable, "tools/image_requirements.py", f"--extra={extra}"]
    picked = subprocess.run([*tool, *options], cwd=ROOT, capture_output=True, text=True, check=True)
    (tmp_path / "picked.lock").write_text(picked.stdout)
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [
            uv, "pip", "install", "--dry-run", "--no-deps", "--require-hashes",
            "--only-binary=:all:", f"--python-platform={platform}", "--python-version=3.11",
            f"--target={tmp_path}/none", "--requirement", tmp_path / "picked.lock",
        ],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install" in done.stderr
    with_cpu = extra == "worker" and platform.startswith("x86") and options == WORKER
    assert ("tensorflow-cpu==" in done.stderr) == with_cpu

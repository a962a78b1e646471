"""buildah with storage of its own, so that it leaves nothing on the machine.

It runs in a separate mount namespace: its mounts end with it, also when it is killed. Its storage
is in the testbed's cache and holds the layers that a later build reuses.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from testbed.binaries import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_S = 1800.0
_POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'


def storage_folder() -> Path:
    """The folder of layers and images between builds."""
    return cache_folder() / "buildah"


def buildah(*arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Run buildah; return its output. Raises: UnavailableError with the end of its output."""
    root = storage_folder()
    root.mkdir(parents=True, exist_ok=True)
    policy = root / "policy.json"
    policy.write_text(_POLICY)
    verb, *rest = arguments
    signed = [f"--signature-policy={policy}"] if verb in {"bud", "push"} else []
    command = [
        "unshare", "--mount", "--propagation=private", "buildah",
        f"--root={root}/storage", f"--runroot={root}/run", "--storage-driver=overlay",
        verb, *signed, *rest,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "BUILDAH_ISOLATION": "chroot"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-4000:]
        raise UnavailableError(f"buildah {verb} failed ({done.returncode}):\n{output}")
    return done.stdout


def has_image(reference: str) -> bool:
    """Whether the storage holds an image of that name."""
    return bool(buildah("images", "--quiet", "--filter", f"reference={reference}").strip())


def digest_of(reference: str) -> str:
    """The digest of that image's manifest, `sha256:...`. Raises: UnavailableError."""
    return buildah("inspect", "--type=image", "--format={{.FromImageDigest}}", reference).strip()

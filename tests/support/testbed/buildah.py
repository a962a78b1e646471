"""buildah with a storage of the testbed's own, so that nothing of it is left on the machine.

It runs in a mount namespace of its own: whatever it mounts ends with it, also when it is killed.
Its storage lies in the testbed's cache and holds the layers that a second build takes up.
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
    """Where layers and images are kept between builds."""
    return cache_folder() / "buildah"


def buildah(*arguments: str, timeout_s: float = _TIMEOUT_S) -> str:
    """What it printed. Raises: UnavailableError with the end of what it said."""
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
        said = (done.stdout + done.stderr).strip()[-4000:]
        raise UnavailableError(f"buildah {verb} failed ({done.returncode}):\n{said}")
    return done.stdout


def has_image(reference: str) -> bool:
    """Whether the storage holds an image of that name."""
    return bool(buildah("images", "--quiet", "--filter", f"reference={reference}").strip())

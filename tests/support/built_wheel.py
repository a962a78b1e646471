"""The wheel that `make dist` builds, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path) -> Path:
    """Build it in that folder, because the repository's build folder may hold deleted modules."""
    settings = folder / "build.cfg"
    settings.write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
    subprocess.run(
        [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--no-build-isolation",
         "--out-dir", str(folder), str(ROOT)],
        env=os.environ | {"DIST_EXTRA_CONFIG": str(settings)},
        check=True,
    )  # fmt: skip
    (wheel,) = folder.glob("dlion-*-py3-none-any.whl")
    return wheel

"""The codecs' inner loops compiled once, before trainers that would each do it start together.

Called by the runner. A process that compiles takes seconds of CPU and holds 60 MB more than one
that loads what was compiled (docs/decisions/0006-compiled-kernels.md). Imports no NumPy.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

_LOG = logging.getLogger(__name__)

PACKAGE = "dlion_worker.codecs"
STAMP = "kernels.compiled"
"""Beside what was compiled, once all of it was: for which source and which Python."""


def compile_kernels() -> None:
    """Leaves machine code where every process finds it; nothing to do where it is there already.

    Where it cannot be kept beside the source (numba then looks elsewhere, or trainers compile for
    themselves), and where `NUMBA_CACHE_DIR` names another place, this does nothing.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.origin or os.environ.get("NUMBA_CACHE_DIR"):
        return
    package = Path(found.origin).parent
    stamp = package / "__pycache__" / STAMP
    changed = sorted((path.name, path.stat().st_mtime_ns) for path in package.glob("*.py"))
    wanted = f"{changed} {sys.version}\n"
    try:
        if stamp.exists() and stamp.read_text() == wanted:
            return
        stamp.parent.mkdir(exist_ok=True)
        stamp.unlink(missing_ok=True)
        stamp.touch()
    except OSError:
        return
    done = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGE}"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        _LOG.warning("the codecs' kernels could not be compiled: %s", done.stderr.strip()[-500:])
        return
    stamp.write_text(wanted)

"""The codecs' inner loops compiled once, before trainers that would each do it start together.

Called by the runner. A process that compiles takes seconds of CPU and holds 60 MB more than one
that loads what was compiled (docs/decisions/0006-compiled-kernels.md). Imports no NumPy.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

_LOG = logging.getLogger(__name__)

PACKAGE = "dlion_worker.codecs"


def compile_kernels() -> None:
    """Leaves machine code where every process finds it; nothing to do where it is there already.

    Where it cannot be kept, trainers compile for themselves: no error.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.origin:
        return
    source = Path(found.origin).with_name("kernels.py")
    kept = source.with_name("__pycache__").glob("kernels.*.nbi")
    if any(file.stat().st_mtime >= source.stat().st_mtime for file in kept):
        return
    done = subprocess.run([sys.executable, "-c", f"import {PACKAGE}"], check=False)
    if done.returncode:
        _LOG.warning("the codecs' kernels could not be compiled: exit code %d", done.returncode)

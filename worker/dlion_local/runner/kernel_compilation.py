"""Compiles the codecs' inner loops once, before several trainers would each do so.

Compiling takes seconds of CPU and 60 MB more memory than loading the compiled code
(docs/decisions/0006-compiled-kernels.md). Imports no NumPy.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

_LOG = logging.getLogger(__name__)

PACKAGE = "dlion_core.codecs"
STAMP = "kernels.compiled"
"""Marks a completed compilation; it holds the source's time stamps and the Python version."""


def compile_kernels() -> None:
    """Compile the kernels into the package's cache, unless they are up to date.

    Does nothing if the cache is not writable (numba then uses another place, or trainers compile
    for themselves), or if `NUMBA_CACHE_DIR` names another place.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.origin or os.environ.get("NUMBA_CACHE_DIR"):
        return
    package = Path(spec.origin).parent
    stamp = package / "__pycache__" / STAMP
    changed = sorted((path.name, path.stat().st_mtime_ns) for path in package.glob("*.py"))
    expected = f"{changed} {sys.version}\n"
    try:
        if stamp.exists() and stamp.read_text() == expected:
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
    stamp.write_text(expected)

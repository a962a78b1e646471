"""Compiles the arithmetic of `codecs` to machine code, once per machine if a cache is writable.

Each kernel has one signature and is compiled at import, never during training. Arguments of other
types raise TypeError. `IN` arrays are only read, and may be read-only or unaligned (payloads are
both).
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba import types

SHIPPED_VARIABLE: Final = "DLION_KERNELS"
CACHE_VARIABLE: Final = "NUMBA_CACHE_DIR"

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_OPTIONS: Final = {
    "nogil": True,  # the exchange's threads continue meanwhile
    "error_model": "numpy",  # division by zero gives inf, as in NumPy
    "fastmath": False,  # replicas must agree bit for bit: no reordering, no fused multiply-add
}


def read_only(dtype: Any) -> Any:
    """The type of a contiguous array that a kernel only reads."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def compiled(signature: Any) -> Callable[[Kernel], Kernel]:
    """Decorator: compile the function to machine code for that signature."""

    def compile_one(function: Kernel) -> Kernel:
        # numba caches in the first writable of NUMBA_CACHE_DIR, `__pycache__` and the user's cache.
        # Files are renamed into place and a signature has one content, so no process reads a wrong
        # or partial file; processes that start together may do the same work twice.
        try:
            done: Kernel = numba.njit(signature, cache=True, **_OPTIONS)(function)
        except (RuntimeError, OSError, EOFError):  # no writable cache, or a damaged one
            done = numba.njit(signature, **_OPTIONS)(function)
        return done

    return compile_one


def inlined(function: Kernel) -> Kernel:
    """Decorator for functions called by kernels of the same file; inlined into each."""
    done: Kernel = numba.njit(**_OPTIONS)(function)
    return done


def install_shipped_kernels() -> None:
    """Copy the kernels compiled at an image's build to numba's cache, completely or not at all.

    numba loads only from a writable folder. Does nothing outside an image, if the cache exists
    already (from another process of the container), or if it is not writable; each process then
    compiles.
    """
    shipped, kept = os.environ.get(SHIPPED_VARIABLE), os.environ.get(CACHE_VARIABLE)
    if not shipped or not kept or Path(kept).exists():
        return
    try:
        made = tempfile.mkdtemp(dir=Path(kept).parent, prefix=f"{Path(kept).name}-")
    except OSError:
        return
    try:
        shutil.copytree(shipped, made, dirs_exist_ok=True)
        Path(made).rename(kept)
    except OSError:  # also if another process was faster
        shutil.rmtree(made, ignore_errors=True)


install_shipped_kernels()

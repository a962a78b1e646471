"""Compiles the arithmetic of `codecs` to machine code, once per machine where that can be kept.

Each kernel has one signature and is compiled when it is imported: no step of a training pays for
it. Arguments of other types are refused with TypeError, never compiled for.

numba keeps what it compiled in `NUMBA_CACHE_DIR`, else in `__pycache__` beside the source, else in
the user's cache folder: the first of them that can be written. Where none can (a container with a
read-only root file system and no such folder), or where it is full, every process compiles for
itself. Processes that start together may do the same work twice; files are put in place by
renaming, and one signature has one content, so none reads half a file or another one's code.

An image ships what was compiled when it was built ($DLION_KERNELS). numba loads from where it can
write alone, so the first process of a container copies that to $NUMBA_CACHE_DIR.

Legend of types: `IN` arrays are only read, and may be read-only or unaligned (payloads are both).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
from numba import types

SHIPPED: Final = "DLION_KERNELS"
KEPT: Final = "NUMBA_CACHE_DIR"

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_OPTIONS: Final = {
    "nogil": True,  # the threads of the exchange go on meanwhile
    "error_model": "numpy",  # a division by zero gives inf, as NumPy's does
    "fastmath": False,  # replicas agree to the last bit: no other order, no fused multiply-add
}


def read_only(dtype: Any) -> Any:
    """The type of a contiguous array that a kernel only reads."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=False)


def compiled(signature: Any) -> Callable[[Kernel], Kernel]:
    """A decorator: the function as machine code for that signature."""

    def compile_one(function: Kernel) -> Kernel:
        try:
            done: Kernel = numba.njit(signature, cache=True, **_OPTIONS)(function)
        except (RuntimeError, OSError, EOFError):  # nowhere to keep it, or what was kept is broken
            done = numba.njit(signature, **_OPTIONS)(function)
        return done

    return compile_one


def inlined(function: Kernel) -> Kernel:
    """A decorator for what kernels of the same file call: compiled into each of them."""
    done: Kernel = numba.njit(**_OPTIONS)(function)
    return done


def take_up_shipped() -> None:
    """Copy what an image ships to where numba looks for it, whole or not at all.

    Nothing happens outside an image, where something is kept already (by another process of the
    container), or where nothing can be written: then each process compiles.
    """
    shipped, kept = os.environ.get(SHIPPED), os.environ.get(KEPT)
    if not shipped or not kept or Path(kept).exists():
        return
    try:
        made = tempfile.mkdtemp(dir=Path(kept).parent, prefix=f"{Path(kept).name}-")
    except OSError:
        return
    try:
        shutil.copytree(shipped, made, dirs_exist_ok=True)
        Path(made).rename(kept)
    except OSError:  # also where another process was faster
        shutil.rmtree(made, ignore_errors=True)


take_up_shipped()

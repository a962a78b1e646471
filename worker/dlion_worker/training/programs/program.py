"""A program as the rest of the trainer sees it, and the border to code that users write."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlion_api.errors import DLionError, ProgramError

Arrays = tuple[NDArray[np.generic], NDArray[np.generic]]
"""Samples x [B, ...] and labels y [B, ...]."""


@dataclass(frozen=True)
class Program:
    """A model to train and, where the user brings them, its loss and its data.

    `build` makes a Keras model whose output are logits [B, ..., class_count] from the shape of
    one sample and the number of classes. `loss` is given (y_true, logits) as tensors and yields a
    scalar or a value per sample; None: softmax cross-entropy. `load_data` is given (split "train"
    or "test", site,
    worker's number within its site). `source` is the user's file, None for a built-in program.
    """

    name: str
    build: Callable[[tuple[int, ...], int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    load_data: Callable[[str, str, int], Any] | None = None
    source: Path | None = None


@contextmanager
def user_code(program: Program, doing: str, advice: str) -> Iterator[None]:
    """Turns whatever the user's code raises into one error that says where and what to do.

    Raises: ProgramError; DLion's own errors pass unchanged.
    """
    try:
        yield
    except DLionError:
        raise
    # A user's program may raise anything, and `sys.exit` must not end the trainer in silence.
    except (Exception, SystemExit) as error:
        place = _place(error, program.source)
        text = str(error).strip()[:1000]
        raise ProgramError(
            f"program {program.name}: {doing} failed{place}: {type(error).__name__}: {text}. "
            f"{advice}"
        ) from error


def _place(error: BaseException, source: Path | None) -> str:
    """` at file:line`, of the innermost frame in the user's file, else of the innermost one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if source is not None and Path(f.filename) == source]
    chosen = own[-1] if own else (frames[-1] if frames else None)
    return f" at {chosen.filename}:{chosen.lineno}" if chosen else ""

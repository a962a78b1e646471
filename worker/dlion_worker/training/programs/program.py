"""A program as the trainer sees it, and the boundary to user code."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion_api.errors import DLionError, ProgramError
from dlion_api.plain_text import error_text
from dlion_worker.training.programs.shape_mismatch import is_about_shapes


@dataclass(frozen=True)
class TrainingProgram:
    """A model to train and, optionally, its loss and data.

    `build` makes a Keras model from the shape of one sample and the number of classes. `loss` gets
    (y_true, y_pred) as tensors and returns a scalar or a value per sample; None: cross-entropy of
    labels, squared error of targets. `accuracy` gets the same and returns values from 0 to 1; None:
    the share of labels that the largest output meets, the coefficient of determination of targets.
    `optimizer` returns a Keras optimizer. `load_data` gets the split ("train" or "test"), the site
    and the worker's number within its site. `augment` changes a training batch, and `callbacks`
    returns Keras callbacks. `sources` are the user's files, the program first; none for a built-in
    program. `loss_name` and `optimizer_name` say in messages where these come from.
    """

    name: str
    build: Callable[[tuple[int, ...], int], Any]
    loss: Callable[[Any, Any], Any] | None = None
    accuracy: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[], Any] | None = None
    load_data: Callable[[str, str, int], Any] | None = None
    augment: Callable[[Any, Any], Any] | None = None
    callbacks: Callable[[], Any] | None = None
    loss_name: str = "loss(y_true, y_pred)"
    optimizer_name: str = "optimizer()"
    sources: tuple[Path, ...] = ()


@contextmanager
def user_code(
    program: TrainingProgram, doing: str, advice: str, mismatch: Callable[[], str] | None = None
) -> Iterator[None]:
    """Turn any exception of user code into one error with location and advice.

    `mismatch` names what to correct if the exception is about shapes: it comes first then, unless
    it raises an exception itself.

    Raises: ProgramError; DLion's own errors pass unchanged.
    """
    try:
        yield
    except DLionError:
        raise
    # User code may raise anything, and `sys.exit` must not end the trainer silently.
    except (Exception, SystemExit) as error:
        location = _location(error, program.sources)
        kind, text = type(error).__name__, error_text(error)
        if text.startswith("in user code:"):  # TensorFlow puts a traceback before the message
            text = text.rpartition("\n\n")[2].strip().removeprefix(f"{kind}: ")
        failure = f"{doing} failed{location}: {kind}: {text[:1000]}"
        if mismatch is not None and is_about_shapes(error, text):
            # Shapes may be unknown; the error comes without them then.
            with suppress(Exception):
                failure, advice = mismatch(), f"The error: {failure}"
        raise ProgramError(f"program {program.name}: {failure}. {advice}") from error


def _location(error: BaseException, sources: tuple[Path, ...]) -> str:
    """` at file:line` of the innermost frame in the user's files, else of the innermost one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) in sources]
    if not own:  # TensorFlow runs a copy of what it compiles, and names the original
        named = re.findall(r'File "([^"]+)", line (\d+)', error_text(error))
        own_named = [each for each in named if Path(each[0]) in sources]
        if own_named:
            return " at {}:{}".format(*own_named[-1])
    chosen = own[-1] if own else (frames[-1] if frames else None)
    return f" at {chosen.filename}:{chosen.lineno}" if chosen else ""

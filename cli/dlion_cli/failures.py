"""The one place where errors become exit codes and messages of the command line."""

from __future__ import annotations

import errno
import logging
from typing import Final

from dlion_api.errors import (
    ContractError,
    DataError,
    DeniedError,
    DivergedError,
    DLionError,
    ProgramError,
    SpecError,
    UnavailableError,
)
from dlion_api.exit_codes import ExitCode
from dlion_worker.results.storage import StorageError

_CODES: Final = (
    (SpecError, ExitCode.SPEC),
    (DataError, ExitCode.DATA),
    (ProgramError, ExitCode.PROGRAM),
    (UnavailableError, ExitCode.UNAVAILABLE),
    (DivergedError, ExitCode.DIVERGED),
    (DeniedError, ExitCode.DENIED),
    (ContractError, ExitCode.FAILED),
)
_STORAGE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
)
_OF_CLUSTERS: Final = frozenset({"kubernetes", "urllib3", "websocket"})
"""Packages of the extra `cluster` alone; all others come with `worker`."""


class EndedError(DLionError):
    """A process of ours ended so, and has said why: this one ends with the same exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> ExitCode:
    """What the process says when this ends it."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, EndedError):
        return error.exit_code
    chain: BaseException | None = error
    while chain is not None:  # a results error wraps the system's
        if isinstance(chain, StorageError):
            return ExitCode.STORAGE
        if isinstance(chain, OSError) and chain.errno in _STORAGE:
            return ExitCode.STORAGE
        chain = chain.__cause__
    if _missing_package(error):
        return ExitCode.UNAVAILABLE
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.FAILED)


def message_of(error: BaseException) -> str:
    """What the user reads. A defect of ours comes with its traceback in the log."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and not isinstance(error, DLionError):
        return _of_the_system(error)
    if isinstance(error, DLionError):
        return str(error)
    if package := _missing_package(error):
        extra = "cluster" if package in _OF_CLUSTERS else "worker"
        return (
            f"this needs the package {package}, which is not installed here. Install it with all "
            f"that belongs to it: pip install 'dlion[{extra}]'"
        )
    logging.getLogger(__name__).error("unexpected error", exc_info=error)
    return f"{type(error).__name__}: {error}. This is a defect of dlion: please report it."


def _of_the_system(error: OSError) -> str:
    """An error that nobody has named an action for, with what to do where a disk is the reason."""
    if error.errno not in _STORAGE:
        return str(error)
    what = "" if error.filename else "a file cannot be read or written: "
    return (
        f"{what}{error}. Free some space (df -h shows where it lacks), make the place writable, or "
        "choose another"
    )


def _missing_package(error: BaseException) -> str:
    """The package of an extra that is not there; empty: that is not what is wrong."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    return "" if package.startswith("dlion_") else package

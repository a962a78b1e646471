"""Maps errors to exit codes and messages of the command line; the only place that does."""

import logging
from typing import Final

from dlion_api.errors import DLionError
from dlion_api.exit_codes import STORAGE_ERRNOS, ExitCode
from dlion_results.run_folder.storage import StorageError

_CLUSTER_PACKAGES: Final = frozenset({"kubernetes", "prometheus_client", "urllib3", "websocket"})
"""Packages of the extra `cluster`; all others belong to `worker`."""

INTERRUPTED: Final = "interrupted"
"""The message of a command that a signal has ended."""


class SubprocessFailedError(DLionError):
    """A `dlion` subprocess failed with this message; the command ends with its exit code."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code for this error."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    chain: BaseException | None = error
    known = set[int]()  # a user's code may make a cycle, as by `raise error from error`
    while chain is not None and id(chain) not in known:  # StorageError may wrap an OSError
        known.add(id(chain))
        if isinstance(chain, StorageError):
            return ExitCode.STORAGE
        if isinstance(chain, OSError) and chain.errno in STORAGE_ERRNOS:
            return ExitCode.STORAGE
        chain = chain.__cause__
    if _missing_package(error):
        return ExitCode.UNAVAILABLE
    return error.exit_code if isinstance(error, DLionError) else ExitCode.FAILED


def message_of(error: BaseException) -> str:
    """The message for the user. For an unexpected error, the traceback is logged too."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and not isinstance(error, DLionError):
        return _os_error_message(error)
    if isinstance(error, DLionError):
        return str(error)
    if package := _missing_package(error):
        extra = "cluster" if package in _CLUSTER_PACKAGES else "worker"
        text = f"this needs the package {package}, which is not installed here"
        return f"{text}. {install_advice(extra)}"
    logging.getLogger(__name__).error("unexpected error", exc_info=error)
    return f"{type(error).__name__}: {error}. This is a bug in dlion: please report it."


def install_advice(extra: str) -> str:
    """How to install what the extra names."""
    from importlib import metadata  # takes long, and few commands need it

    wheel = f"dist/dlion-{metadata.version('dlion')}-py3-none-any.whl"
    return f"Install it: pip install '{wheel}[{extra}]' (`make dist` builds the wheel)"


def _os_error_message(error: OSError) -> str:
    """A system error, with advice if a disk is the cause."""
    if error.errno not in STORAGE_ERRNOS:
        return str(error)
    what = "" if error.filename else "a file cannot be read or written: "
    return (
        f"{what}{error}. Free some space (see df -h), make the folder writable, or choose another"
    )


def _missing_package(error: BaseException) -> str:
    """The missing package of an extra; empty for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    return "" if package.startswith("dlion_") else package

"""Test the exit codes of errors, as docs/errors-and-exit-codes.md has them.

Each kind of error has its code, also below another error. A full disk is not a defect of the
program.

Left out: the output of commands (test_commands).
"""

from __future__ import annotations

import errno

import pytest

from dlion_api import errors
from dlion_api.exit_codes import ExitCode
from dlion_cli.terminal.failures import SubprocessFailedError, exit_code_of


class OwnDivergedError(errors.DivergedError):
    """An error class below another one."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.DataError("no file"), ExitCode.DATA),
        (errors.ProgramError("raised"), ExitCode.PROGRAM),
        (errors.UnavailableError("away"), ExitCode.UNAVAILABLE),
        (errors.DivergedError("nan"), ExitCode.DIVERGED),
        (OwnDivergedError("nan"), ExitCode.DIVERGED),
        (errors.DeniedError("no right"), ExitCode.DENIED),
        (errors.ContractError("nonsense"), ExitCode.FAILED),
        (errors.DLionError("any"), ExitCode.FAILED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (SubprocessFailedError("its own", ExitCode.DIVERGED), ExitCode.DIVERGED),
        (OSError(errno.ENOSPC, "full"), ExitCode.STORAGE),
        (ZeroDivisionError(), ExitCode.FAILED),
    ],
)
def test_each_error_has_its_code(error: BaseException, code: ExitCode) -> None:
    assert exit_code_of(error) is code


def test_a_full_disk_below_another_error_is_storage() -> None:
    error = errors.DataError("cannot be written")
    error.__cause__ = OSError(errno.ENOSPC, "full")
    assert exit_code_of(error) is ExitCode.STORAGE


def test_an_error_whose_cause_is_its_own_cause_has_its_code() -> None:
    """A program may `raise error from error`."""
    cause, error = ValueError("no layers"), errors.ProgramError("build_model() failed")
    cause.__cause__ = cause
    error.__cause__ = cause
    assert exit_code_of(error) is ExitCode.PROGRAM

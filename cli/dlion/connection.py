"""Checks the keywords with which a client chooses a cluster."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dlion_api.errors import Problem, SpecError
from dlion_cli.cluster.connection_settings import (
    MAX_TIMEOUT_S,
    ConnectionSettings,
    header_value,
    server_url,
)

_PATHS: Final = ("kubeconfig", "certificate_authority")
_HEADERS: Final = ("token", "tls_server_name", "impersonated_user", "impersonated_groups")


def connection_settings(given: Mapping[str, Any]) -> ConnectionSettings:
    """The settings of these names; None: not given. Raises: SpecError, which prints no token."""
    values: dict[str, Any] = {
        name: _value(name, value) for name, value in given.items() if value is not None
    }
    settings = ConnectionSettings(**values)
    try:
        settings.check()
    except ValueError as error:
        raise SpecError([Problem("connection", str(error))], source="Client") from None
    return settings


def _value(name: str, value: object) -> object:
    """The setting as `ConnectionSettings` has it. Raises: SpecError."""
    if name == "insecure_skip_tls_verify":
        if isinstance(value, bool):
            return value
        raise _refused(name, value, "True or False")
    if name == "request_timeout_s":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value <= MAX_TIMEOUT_S:  # type: ignore[operator] # a number
            return value
        raise _refused(name, value, f"seconds from 0 (no limit) to {MAX_TIMEOUT_S:.0f}")
    if name == "impersonated_groups":
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_text(name, each) for each in value)
        raise _refused(name, value, "a list of the groups' names")
    return _text(name, str(value) if name in _PATHS and isinstance(value, Path) else value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refused(name, value, "a str or pathlib.Path" if name in _PATHS else "a str")
    try:
        if name == "server":
            return server_url(value)
        return header_value(value) if name in _HEADERS else value
    except ValueError as error:
        raise SpecError([Problem(name, str(error))], source="Client") from None


def _refused(name: str, value: object, allowed: str) -> SpecError:
    """The error for a value of a wrong type; it has the type, as the value may be a token."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    shown = reprlib.repr(value) if is_number else type(value).__name__
    return SpecError([Problem(name, "is not valid", shown, allowed)], source="Client")

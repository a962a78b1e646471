"""Bytes from the wire to messages, so that what cannot be read is refused with a reason.

Used by the gRPC services of coordinator and federation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dlion_api.errors import ContractError

_Message = TypeVar("_Message", bound=Message)


def parser(message: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    """Bytes to message; what cannot be read is passed on, to be refused and counted by the call.

    gRPC would answer INTERNAL by itself, and nobody would know why.
    """

    def parse(content: bytes) -> Message | DecodeError:
        try:
            return message.FromString(content)
        except DecodeError as error:  # wrong UTF-8 in a text field, too
            return error

    return parse


def readable(message: _Message | DecodeError) -> _Message:
    """That message. Raises: ContractError where it could not be read."""
    if isinstance(message, DecodeError):
        raise ContractError(f"the message cannot be read: {message}")
    return message

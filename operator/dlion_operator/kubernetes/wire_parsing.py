"""Parse protobuf messages so that unreadable ones are refused with a reason.

Used by the gRPC services of coordinator and federation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dlion_api.errors import ContractError

_Message = TypeVar("_Message", bound=Message)


def parser(message: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    """Return a deserializer that returns parse errors, which the call refuses and counts.

    If it raised, gRPC would answer INTERNAL without a reason.
    """

    def parse(content: bytes) -> Message | DecodeError:
        try:
            return message.FromString(content)
        except DecodeError as error:  # also for invalid UTF-8 in a string field
            return error

    return parse


def readable(message: _Message | DecodeError) -> _Message:
    """Return the message. Raises: ContractError if it could not be parsed."""
    if isinstance(message, DecodeError):
        raise ContractError(f"the message cannot be read: {message}")
    return message

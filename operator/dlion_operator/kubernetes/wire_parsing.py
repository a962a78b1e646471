"""What the gRPC servers of coordinator and federation share: options, and checks of messages."""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dlion_api.errors import ContractError
from dlion_api.protocol.refusals import MAX_TEXT_BYTES

MAX_COUNTER = 2**53
"""Maximum of incarnations, versions and sequence numbers; also exact in JSON."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_metadata_size", 16 * 1024),
    # Detects a caller whose node or link failed silently within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A machine that was paused sends late pings close together, which is not abuse.
    ("grpc.http2.max_ping_strikes", 0),
    # A second process on the same port must fail instead of sharing it.
    ("grpc.so_reuseport", 0),
)

_Message = TypeVar("_Message", bound=Message)


def check_length(name: str, text: str, limit: int = MAX_TEXT_BYTES) -> None:
    """Check the bytes of a text. Raises: ContractError if it is too long."""
    if len(text.encode()) > limit:
        raise ContractError(f"{name} of {len(text)} characters; allowed: {limit} bytes")


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

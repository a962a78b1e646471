"""Cancellations that grpc.aio loses."""

import asyncio


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task has been cancelled and still runs.

    Call it in a loop that continues after an error of a call. `StreamStreamCall.read` raises the
    call's error instead of a cancellation that arrives after the status and before the initial
    metadata. Without this check neither that task ends nor what awaits it.

    Raises: asyncio.CancelledError.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError

"""Admits a real worker to the run: executes the instructions of `lifecycle.admission`."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from dlion_api.errors import ContractError, UnavailableError
from dlion_core.lifecycle.admission import (
    Admission,
    AdmissionInstruction,
    AdoptState,
    KeepOwnState,
    PullState,
)
from dlion_core.links.events import StateSnapshot
from dlion_core.policies.interface import SendMessage
from dlion_worker.trainer.signal_handler import Interrupted
from dlion_worker.trainer.waiting_inbox import WaitingInbox
from dlion_worker.transport import PeerExchange

_LOG = logging.getLogger(__name__)

SLICE_S = 0.1


def join_run(
    admission: Admission,
    exchange: PeerExchange,
    inbox: WaitingInbox,
    stopped: Callable[[], str | None],
    on_wait: Callable[[int], None] = lambda _iteration: None,
) -> StateSnapshot | None:
    """Wait for admission. Return a peer's state to adopt; None: keep the own one.

    Also returns when the run is over; `inbox.stop_reason` is then set. `on_wait` is called
    repeatedly meanwhile, with the last finished iteration. Raises: Interrupted when this worker is
    asked to stop.
    """
    while True:
        instructions: deque[AdmissionInstruction] = deque(admission.advance(time.monotonic()))
        while instructions:
            match instructions.popleft():
                case AdoptState(snapshot):
                    return snapshot
                case KeepOwnState():
                    return None
                case SendMessage(peer, message):
                    exchange.send(peer, message)
                case PullState() as pull:
                    state = _pull(exchange, pull)
                    instructions += admission.pulled(state, time.monotonic())
        if (reason := stopped()) is not None:
            raise Interrupted(reason)
        on_wait(inbox.iteration)
        inbox.wait(SLICE_S)


def _pull(exchange: PeerExchange, pull: PullState) -> StateSnapshot | None:
    try:
        return exchange.pull_state(pull.peer, pull.wanted)
    except (UnavailableError, ContractError) as error:
        _LOG.warning("worker %d gave no state: %s", pull.peer, error)
        return None

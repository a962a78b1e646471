"""What a worker's main thread spends its exchange time on: select, encode, send, decode, apply.

The trainer's loop reads the clock once per step. The executor of instructions and the codecs mark
where a phase begins and ends, without knowing the clock: the one in use is a context variable,
unset in other threads and in the simulator. A mark without a clock costs half a microsecond.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import wraps
from typing import ParamSpec, TypeVar

from dlion_api.protocol.measurements import PhaseSeconds

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Phase(StrEnum):
    """What the thread does. A phase within another interrupts it, so that no second counts
    twice."""

    SELECT = "select"
    """The policy's own work: which entries each link carries."""
    ENCODE = "encode"
    SEND = "send"
    """Putting messages into the links' queues; the exchange's thread cuts and sends them."""
    DECODE = "decode"
    """Checking, decoding and adding up the peers' messages."""
    APPLY = "apply"
    """Changing the weights: optimizer, averages, replacements."""
    NONE = "none"


class PhaseClock:
    """Seconds of one thread by phase, since the last `restart`."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._phase = Phase.NONE
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._since_s = self._clock_s()

    def enter(self, phase: Phase) -> Phase:
        """Charge the time until now to the current phase, and return that."""
        now_s, before = self._clock_s(), self._phase
        self._seconds[before] += now_s - self._since_s
        self._since_s, self._phase = now_s, phase
        return before

    def read(self) -> PhaseSeconds:
        """Seconds since `restart`."""
        self.enter(self._phase)
        spent = self._seconds
        return PhaseSeconds(
            select_s=spent[Phase.SELECT],
            encode_s=spent[Phase.ENCODE],
            send_s=spent[Phase.SEND],
            decode_s=spent[Phase.DECODE],
            apply_s=spent[Phase.APPLY],
        )


_IN_USE: ContextVar[PhaseClock | None] = ContextVar("phase clock", default=None)


@contextmanager
def measured_by(clock: PhaseClock) -> Iterator[None]:
    """Let this thread's phases be measured by that clock."""
    token = _IN_USE.set(clock)
    try:
        yield
    finally:
        _IN_USE.reset(token)


@contextmanager
def in_phase(phase: Phase) -> Iterator[None]:
    """The block is that phase."""
    if (clock := _IN_USE.get()) is None:
        yield
        return
    before = clock.enter(phase)
    try:
        yield
    finally:
        clock.enter(before)


def counts_as(phase: Phase) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorator: each call of the function is that phase."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
            if (clock := _IN_USE.get()) is None:
                return function(*arguments, **named)
            before = clock.enter(phase)
            try:
                return function(*arguments, **named)
            finally:
                clock.enter(before)

        return call

    return decorate

"""A policy of an installed package behind the border: what it raises or yields is held against it.

Made by `building` around the machine, or the sending, of such a policy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dlion_worker.codecs import NotFiniteError
from dlion_worker.policies.interface import Instruction
from dlion_worker.policies.sending import Outgoing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dlion_api.names import Rank
    from dlion_worker.policies.installed import Installed
    from dlion_worker.policies.interface import Event, Flat, Machine, Value
    from dlion_worker.policies.sending import Sending

Build = Callable[[Any, Any], Any]
"""Of a context and parameters a machine."""

_MACHINE: Final = ("handle", "waiting_for", "next_iteration", "state", "restore")
_PASSING: Final = (NotFiniteError,)
"""Of numbers that were to be sent: the run has diverged, whoever codes them."""


def built(origin: Installed, builder: Callable[[], Build], *about: Any) -> GuardedMachine:
    """Its machine for a worker; `builder` brings the function that makes it.

    Raises: ProgramError.
    """
    with origin.code("loading"):
        build = builder()
    with origin.code("making a worker's machine", at=build):
        machine = build(*about)
    if any(not callable(getattr(machine, name, None)) for name in _MACHINE):
        raise origin.wrong_answer(build, machine, f"a Machine, with {', '.join(_MACHINE)}")
    return GuardedMachine(origin, machine)


class GuardedMachine:
    """A `Machine` whose errors name the policy. Each method raises: ProgramError."""

    def __init__(self, origin: Installed, machine: Machine) -> None:
        self._origin, self._machine = origin, machine

    def handle(self, event: Event) -> list[Instruction]:
        """As the machine does."""
        handle = self._machine.handle
        with self._origin.code(f"handling {type(event).__name__}", at=handle, passing=_PASSING):
            told = handle(event)
        if not isinstance(told, list):
            raise self._origin.wrong_answer(handle, told, "a list of instructions")
        for each in told:
            if not isinstance(each, Instruction):
                raise self._origin.wrong_answer(handle, each, "instructions in its list")
        return told

    def waiting_for(self) -> frozenset[Rank]:
        """As the machine says."""
        with self._origin.code("waiting_for", at=self._machine.waiting_for):
            return frozenset(self._machine.waiting_for())

    def next_iteration(self) -> int:
        """As the machine says."""
        with self._origin.code("next_iteration", at=self._machine.next_iteration):
            return int(self._machine.next_iteration())

    def state(self) -> dict[str, Value]:
        """The machine's."""
        with self._origin.code("state", at=self._machine.state):
            return dict(self._machine.state())

    def restore(self, state: Mapping[str, Value]) -> None:
        """Gives the machine back what `state` gave."""
        with self._origin.code("restore", at=self._machine.restore):
            self._machine.restore(state)


class GuardedSending:
    """A `Sending` whose payloads are what a machine can send."""

    def __init__(self, origin: Installed, sending: Sending) -> None:
        self._origin, self._sending = origin, sending
        self.combines = sending.combines

    def forget(self, peer: Rank) -> None:
        """As the policy does."""
        self._sending.forget(peer)

    def state(self) -> dict[str, Value]:
        """The policy's."""
        return self._sending.state()

    def restore(self, state: Mapping[str, Value]) -> None:
        """Gives the policy back what `state` gave."""
        self._sending.restore(state)

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> Outgoing:
        """As the policy does. Raises: ProgramError."""
        prepare = self._sending.prepare
        with self._origin.code("prepare", at=prepare, passing=_PASSING):
            outgoing = prepare(gradient_D, peers, budget_bytes)
        if not isinstance(outgoing, Outgoing):
            raise self._origin.wrong_answer(prepare, outgoing, "an Outgoing")
        for payload in outgoing.payloads.values():
            if not isinstance(payload, bytes | memoryview):
                raise self._origin.wrong_answer(prepare, payload, "payloads of bytes")
        return outgoing


def behind_border(origin: Installed | None, sending: Sending) -> Sending:
    """That sending; guarded where it is an installed package's."""
    return sending if origin is None else GuardedSending(origin, sending)

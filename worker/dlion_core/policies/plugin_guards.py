"""Wrappers around policies of installed packages: check results and attribute errors to them.

`factory` uses them for such policies only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dlion_api.names import Rank
from dlion_core.codecs import NotFiniteError
from dlion_core.policies.gradient.gradient_selectors import GradientSelector, OutgoingPayloads
from dlion_core.policies.interface import Event, Flat, Instruction, PolicyMachine, Value
from dlion_core.policies.plugins import PolicyPlugin

_MACHINE: Final = ("handle", "waiting_for", "next_iteration", "state", "restore")
_PASSING: Final = (NotFiniteError,)
"""Non-finite values to send mean that the run diverged, whichever code detected them."""


def build_guarded(
    origin: PolicyPlugin, builder: Callable[[], Callable[[Any, Any], Any]], *about: Any
) -> GuardedMachine:
    """Return a plugin's machine for a worker. `builder` returns the function that builds it.
    Raises ProgramError if its code failed or returned no machine."""
    with origin.code("loading"):
        build = builder()
    with origin.code("making a worker's machine", at=build):
        machine = build(*about)
    if any(not callable(getattr(machine, name, None)) for name in _MACHINE):
        raise origin.wrong_result(build, machine, f"a PolicyMachine, with {', '.join(_MACHINE)}")
    return GuardedMachine(origin, machine)


class GuardedMachine:
    """A `PolicyMachine` whose errors name the policy. Each method raises ProgramError."""

    def __init__(self, origin: PolicyPlugin, machine: PolicyMachine) -> None:
        self._origin, self._machine = origin, machine

    def handle(self, event: Event) -> list[Instruction]:
        """Delegate to the machine and check the result."""
        handle = self._machine.handle
        with self._origin.code(f"handling {type(event).__name__}", at=handle, passing=_PASSING):
            instructions = handle(event)
        if not isinstance(instructions, list):
            raise self._origin.wrong_result(handle, instructions, "a list of instructions")
        for each in instructions:
            if not isinstance(each, Instruction):
                raise self._origin.wrong_result(handle, each, "instructions in its list")
        return instructions

    def waiting_for(self) -> frozenset[Rank]:
        with self._origin.code("waiting_for", at=self._machine.waiting_for):
            return frozenset(self._machine.waiting_for())

    def next_iteration(self) -> int:
        with self._origin.code("next_iteration", at=self._machine.next_iteration):
            return int(self._machine.next_iteration())

    def state(self) -> dict[str, Value]:
        with self._origin.code("state", at=self._machine.state):
            return dict(self._machine.state())

    def restore(self, state: Mapping[str, Value]) -> None:
        with self._origin.code("restore", at=self._machine.restore):
            self._machine.restore(state)


class GuardedSelector:
    """A `GradientSelector` whose payloads are checked."""

    def __init__(self, origin: PolicyPlugin, selector: GradientSelector) -> None:
        self._origin, self._selector = origin, selector
        self.combines = selector.combines

    def forget(self, peer: Rank) -> None:
        self._selector.forget(peer)

    def state(self) -> dict[str, Value]:
        return self._selector.state()

    def restore(self, state: Mapping[str, Value]) -> None:
        self._selector.restore(state)

    def prepare(
        self, gradient_D: Flat, peers: Sequence[Rank], budget_bytes: Mapping[Rank, int]
    ) -> OutgoingPayloads:
        """Delegate to the policy and check the result. Raises ProgramError."""
        prepare = self._selector.prepare
        with self._origin.code("prepare", at=prepare, passing=_PASSING):
            outgoing = prepare(gradient_D, peers, budget_bytes)
        if not isinstance(outgoing, OutgoingPayloads):
            raise self._origin.wrong_result(prepare, outgoing, "an OutgoingPayloads")
        for payload in outgoing.payloads.values():
            if not isinstance(payload, bytes | memoryview):
                raise self._origin.wrong_result(prepare, payload, "payloads of bytes")
        return outgoing

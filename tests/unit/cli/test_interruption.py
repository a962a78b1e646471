"""Test the handling of signals by the command line.

- The first signal interrupts and later ones have no effect; a hang-up under `nohup` is ignored.
- A signal whose exception Python drops is raised again, one that a command has taken is not. None
  is sent while Python shuts down.
- Output for a closed terminal is dropped without an error. Only after a signal, work over its time
  limit is cancelled, whatever exceptions it catches. The handlers are restored.
- A signal during the import of a command, or blocked until then, ends it with 130 and a message
  before it begins. So does one while it prints an error, also that of an earlier signal.

Left out: real runs (tests/local/test_interrupts.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time

import click
import pytest

from dlion_cli.terminal.interruption import (
    OutOfTimeError,
    exit_on_signals,
    interruptible,
    raise_on_signals,
    take_interrupt,
)

pytestmark = pytest.mark.timeout(60, method="thread")  # the other method uses SIGALRM, too
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


@pytest.fixture(autouse=True)
def same_handlers_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def work_that_swallows_errors(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        try:
            time.sleep(0.01)
        except Exception:  # noqa: BLE001 - what a library may do
            continue


@pytest.fixture
def default_hangup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts_and_a_second_has_no_effect(number, default_hangup):
    with interruptible() as interruption:
        assert interruption.at_s is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert interruption.at_s is not None
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)


def test_a_signal_whose_exception_python_drops_still_interrupts():
    """Python drops exceptions in `__del__` and in callbacks of weak references."""

    class SignalledAtItsEnd:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    hook = sys.unraisablehook
    with interruptible():
        SignalledAtItsEnd()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(10)
    assert sys.unraisablehook is hook


def test_a_hang_up_under_nohup_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as interruption:
            signal.raise_signal(signal.SIGHUP)
            assert interruption.at_s is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_for_a_closed_terminal_is_dropped(default_hangup, monkeypatch):
    ours, its = os.openpty()
    with os.fdopen(its, "w") as terminal:
        monkeypatch.setattr(sys, "__stdout__", terminal)
        with interruptible():
            os.close(ours)
            with pytest.raises(OSError, match="Input/output"):
                os.write(terminal.fileno(), b"x")
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGHUP)
            assert os.write(terminal.fileno(), b"x") == 1


def test_long_work_is_cancelled_after_a_signal():
    with interruptible(within_s=0.2) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(OutOfTimeError), interruption.time_limit():
            work_that_swallows_errors(20)
        assert time.monotonic() - interruption.at_s < 10


def test_work_is_cancelled_immediately_without_remaining_time():
    with interruptible(within_s=-1.0) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(OutOfTimeError), interruption.time_limit():
            work_that_swallows_errors(20)


def test_work_that_ends_in_time_is_not_cancelled():
    with interruptible(within_s=30.0) as interruption:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        with interruption.time_limit():
            work_that_swallows_errors(0.02)


def test_work_without_a_signal_has_no_time_limit():
    with interruptible(within_s=0.0) as interruption, interruption.time_limit():
        work_that_swallows_errors(0.05)


AT_AN_IMPORT = """
import os, sys
from dlion_cli.__main__ import main


class Interrupting:
    def find_spec(self, name, *_):
        if name == "dlion_cli.commands.local.run":
            os.kill(os.getpid(), {number})


sys.meta_path.insert(0, Interrupting())
sys.argv[1:] = ["run"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_import_of_a_command_ends_it_with_a_message(number, default_hangup):
    code = AT_AN_IMPORT.format(number=int(number))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "dlion: interrupted\n")


IN_A_MESSAGE = """
import signal, sys
from dlion_cli import command_line
from dlion_cli.__main__ import main

message_of = command_line.message_of


def interrupted(error):
    signal.raise_signal({number})
    return message_of(error)


def interrupting(*_, **__):
    signal.raise_signal(signal.SIGINT)


command_line.message_of = interrupted
if {is_second}:
    from dlion_cli.cluster import client
    client.choose_context = interrupting
sys.argv[1:] = ["get", "--kubeconfig", "/nowhere"]
sys.exit(main())
"""


@pytest.mark.parametrize("is_second", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_an_error_is_printed_ends_it_with_a_message(
    number, is_second, default_hangup
):
    code = IN_A_MESSAGE.format(number=int(number), is_second=is_second)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    # click ends the line of a Ctrl-C
    assert (done.returncode, done.stderr.lstrip()) == (130, "dlion: interrupted\n")


def test_a_signal_that_was_blocked_at_the_start_ends_the_command(default_hangup):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "dlion_cli", "run"], stderr=subprocess.PIPE, text=True
        )
        process.terminate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.communicate()[1] == "dlion: interrupted\n"
    assert process.returncode == 130


@contextlib.contextmanager
def signals_of_a_command():
    before, hook = {each: signal.getsignal(each) for each in SIGNALS}, sys.unraisablehook
    try:
        exit_on_signals()
        raise_on_signals()
        yield
        time.sleep(0.1)  # a signal that is sent again would come now
    finally:
        sys.unraisablehook = hook
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_after_the_imports_interrupts(number, default_hangup):
    with signals_of_a_command():
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(number)
        assert take_interrupt(caught.value) == 130
        raise_on_signals()


def test_an_interruption_that_becomes_another_error_is_taken_with_it(default_hangup):
    def prompt():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise click.Abort from None

    with signals_of_a_command():
        with pytest.raises(click.Abort) as caught:
            prompt()
        take_interrupt(caught.value)
        del caught


def test_an_error_of_a_cleanup_is_taken_with_the_interruption_before_it(default_hangup):
    def clean_up(earlier):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("no") from earlier  # the interruption is its context only

    with signals_of_a_command():
        with pytest.raises(RuntimeError) as caught:
            clean_up(OSError("before"))
        take_interrupt(caught.value)
        del caught


def test_errors_that_name_each_other_as_cause_end_a_command(default_hangup):
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert take_interrupt(one) == 130
    other.__cause__ = other  # `raise error from error`
    assert take_interrupt(other) == 130


class AbandonedResponse(io.RawIOBase):
    def close(self):
        if not self.closed:
            super().close()
            signal.raise_signal(signal.SIGINT)


class AbandonedObject:
    number = signal.SIGINT

    def __del__(self):
        signal.raise_signal(self.number)


@pytest.mark.parametrize("abandoned", [AbandonedResponse, AbandonedObject])
def test_a_signal_in_a_finalizer_interrupts_what_follows(abandoned, default_hangup, capfd):
    with signals_of_a_command():
        abandoned()
        with pytest.raises(KeyboardInterrupt) as caught:
            time.sleep(10)
        take_interrupt(caught.value)
    assert capfd.readouterr().err == ""


def test_the_same_signal_comes_again_after_a_finalizer(default_hangup, monkeypatch):
    """A shell's script starts background commands with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    monkeypatch.setattr(AbandonedObject, "number", signal.SIGTERM)
    try:
        with signals_of_a_command():
            AbandonedObject()
            with pytest.raises(KeyboardInterrupt) as caught:
                time.sleep(10)
            take_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGINT, before)


UNTAKEN = """
import signal
from dlion_cli.terminal.interruption import exit_on_signals, raise_on_signals

exit_on_signals()
raise_on_signals()
signal.raise_signal(signal.SIGINT)
"""


def test_a_signal_while_the_process_ends_does_not_hold_it(default_hangup):
    """Such as a second Ctrl-C, once the command has ended: Python finalizes its exception last."""
    done = subprocess.run(
        [sys.executable, "-c", UNTAKEN], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith("_Interrupt")


def test_signals_that_the_parent_ignores_stay_ignored(default_hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_of_a_command():
        signal.raise_signal(signal.SIGHUP)

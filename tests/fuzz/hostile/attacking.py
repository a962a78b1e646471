"""Runs attacks, counts them, and holds each hostile input against bounds of time and memory.

An attack makes one hostile input, gives it to the real parser and looks at what comes of it. It
yields a word for that ("refused", "taken"), or None where nothing came out altered, which is not
counted. Any exception that the parser is not documented to raise ends the run as a defect, with
the seed and number that make it again.
"""

from __future__ import annotations

import contextlib
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_CPU_S = 2.0
"""Of this process for one input; all but documents need less than a hundredth of it."""

MOST_GROWTH_KIB = 96 * 1024
"""By which one input may raise the process's peak of resident memory."""

FIRST = 4
"""The first inputs load modules and fill caches: the bounds are not theirs."""

Attack = Callable[[random.Random, Path], str | None]


@dataclass(frozen=True)
class Target:
    """Something that parses what others write."""

    name: str
    attack: Attack
    inputs_per_frame: float
    """Hostile inputs for each hostile frame that is asked for."""

    def count(self, frames: int) -> int:
        """Hostile inputs where so many frames are asked for."""
        return max(20, round(frames * self.inputs_per_frame))


def run(target: Target, count: int, seed: int, folder: Path) -> Counter[str]:
    """What became of `count` hostile inputs, by word. `folder`: for files, emptied by whoever.

    Raises:
        Whatever the parser raises beside its documented error, with a note on how to repeat it.
    """
    words: Counter[str] = Counter()
    number = 0
    _forget_peak()
    while words.total() < count:
        number += 1
        chance = random.Random((seed << 40) + number)
        peak_kib, began_s = _peak_kib(), time.process_time()
        try:
            word = target.attack(chance, folder)
            cpu_s, growth_kib = time.process_time() - began_s, _peak_kib() - peak_kib
            if number > FIRST:
                assert cpu_s < MOST_CPU_S, f"took {cpu_s:.1f} s"
                assert growth_kib < MOST_GROWTH_KIB, f"took {growth_kib} KiB"
        except BaseException as error:
            error.add_note(f"hostile input: target {target.name!r}, seed {seed}, number {number}")
            raise
        if word is not None:
            words[word] += 1
    return words


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> None:
    """Lets the peak begin at what is resident now, where the kernel lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

"""Run attacks, count them, and check each hostile input against bounds of time and memory.

An attack makes one hostile input, gives it to the real parser and checks the result. It returns a
word for the result ("refused", "taken"). It returns None for an input that came out unaltered,
which does not count. An undocumented exception of the parser ends the run as a defect, with the
seed and number that repeat it.
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

MAX_CPU_S = 2.0
"""CPU time of this process for one input; all but documents need less than a hundredth of it."""

MAX_GROWTH_KIB = 96 * 1024
"""The limit for the growth of the process's peak of resident memory by one input."""

FIRST = 4
"""The number of first inputs, which load modules and fill caches; the bounds do not
apply to them.
"""

Attack = Callable[[random.Random, Path], str | None]


@dataclass(frozen=True)
class Target:
    """A parser of input that others write."""

    name: str
    attack: Attack
    inputs_per_frame: float
    """Hostile inputs for each hostile frame."""

    def count(self, frames: int) -> int:
        """Return the number of hostile inputs for this number of frames."""
        return max(20, round(frames * self.inputs_per_frame))


def run(target: Target, count: int, seed: int, folder: Path) -> Counter[str]:
    """Return the results of `count` hostile inputs, by word. `folder`: for files; the attack
    empties it.

    Raises: Any exception of the parser except its documented error, with a note on how to repeat
    it.
    """
    words: Counter[str] = Counter()
    number = 0
    _forget_peak()
    while words.total() < count:
        number += 1
        rng = random.Random((seed << 40) + number)
        peak_kib, began_s = _peak_kib(), time.process_time()
        try:
            word = target.attack(rng, folder)
            cpu_s, growth_kib = time.process_time() - began_s, _peak_kib() - peak_kib
            if number > FIRST:
                assert cpu_s < MAX_CPU_S, f"took {cpu_s:.1f} s"
                assert growth_kib < MAX_GROWTH_KIB, f"took {growth_kib} KiB"
        except BaseException as error:
            error.add_note(f"hostile input: target {target.name!r}, seed {seed}, number {number}")
            raise
        if word is not None:
            words[word] += 1
    return words


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _forget_peak() -> None:
    """Reset the peak to the present resident memory, if the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")

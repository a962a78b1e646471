"""What a worker keeps in its state folder so that a new process can go on without a coordinator.

Owns two small files: the last membership, and the counter of incarnations. Both are replaced
atomically; a damaged one counts as missing.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlion_api.atomic_file import write_atomically
from dlion_api.membership import Member, Membership, MemberState
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity

_LOG = logging.getLogger(__name__)

MEMBERSHIP_FILE = "membership.json"
INCARNATION_FILE = "incarnation"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Kept:
    """The last membership, and when the run began by this machine's monotonic clock."""

    membership: Membership
    start_time_monotonic_s: float


def next_incarnation(state_dir: Path | str, *, wall_clock_s: float | None = None) -> int:
    """The number of this start: higher than every earlier one of this worker, and on disk.

    It is the kept number plus one, or the wall clock in whole seconds where that is higher. So it
    grows with each start whatever the clock does, as long as the folder lives, and a worker whose
    folder is lost starts above its earlier numbers unless the clock went back. In that last case
    the coordinator refuses it and says which number it knows; `note_known_incarnation` keeps that
    one, and the next start passes. Source: ours.

    Raises:
        OSError: the folder is not writable.
    """
    now_s = time.time() if wall_clock_s is None else wall_clock_s
    incarnation = max(_kept_incarnation(Path(state_dir)) + 1, int(now_s))
    write_atomically(Path(state_dir) / INCARNATION_FILE, f"{incarnation}\n".encode())
    return incarnation


def note_known_incarnation(state_dir: Path | str, known: int) -> None:
    """Makes the next start's number higher than `known`."""
    if known > _kept_incarnation(Path(state_dir)):
        write_atomically(Path(state_dir) / INCARNATION_FILE, f"{known}\n".encode())


def _kept_incarnation(state_dir: Path) -> int:
    path = state_dir / INCARNATION_FILE
    try:
        text = path.read_text(encoding="ascii")
        kept = int(text)
    except FileNotFoundError:
        return 0
    except ValueError:  # also UnicodeDecodeError
        _LOG.warning("%s is damaged: counting from the clock", path)
        return 0
    return max(kept, 0)


def keep_membership(state_dir: Path | str, kept: Kept) -> None:
    """Puts the membership on disk.

    Raises:
        OSError: the disk is full or the folder is not writable; the old one stands.
    """
    document = {
        "boot": _boot_id(),
        "start_time_monotonic_s": kept.start_time_monotonic_s,
        "membership": _document(kept.membership),
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomically(Path(state_dir) / MEMBERSHIP_FILE, text.encode())


def kept_membership(state_dir: Path | str, job: JobKey) -> Kept | None:
    """The membership kept of that run; None where there is none, or none that can be read."""
    path = Path(state_dir) / MEMBERSHIP_FILE
    try:
        document = json.loads(path.read_bytes())
        membership = _membership(document["membership"])
        # Monotonic clocks begin with the machine: after a reboot, or elsewhere, it says nothing.
        same_boot = document["boot"] == _boot_id()
        start_s = float(document["start_time_monotonic_s"]) if same_boot else math.nan
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _LOG.warning("%s is damaged: going on without it (%r)", path, error)
        return None
    return Kept(membership, start_s) if membership.job == job else None


def forget_membership(state_dir: Path | str) -> None:
    """Removes the kept membership: for a run that starts anew or is resumed on other ports."""
    (Path(state_dir) / MEMBERSHIP_FILE).unlink(missing_ok=True)


def merged(kept: Membership | None, received: Membership) -> Membership:
    """The received membership, with whom it does not name taken from the kept one.

    A coordinator lists everyone who ever joined *it*: after its restart that is nobody at first,
    and those it does not name yet are not lost. Its own word on a member always counts.
    """
    if kept is None or kept.job != received.job:
        return received
    named = {member.identity.rank for member in received.members}
    others = [m for m in kept.members if m.identity.rank not in named]
    members = sorted((*received.members, *others), key=lambda member: member.identity.rank)
    return Membership(received.version, received.job, received.expected_count, tuple(members))


def _document(membership: Membership) -> dict[str, Any]:
    return {
        "version": membership.version,
        "namespace": membership.job.namespace,
        "name": membership.job.name,
        "run_id": membership.job.run_id,
        "expected_count": membership.expected_count,
        "members": [
            {
                "rank": member.identity.rank,
                "site": member.identity.site,
                "group": member.identity.group,
                "index": member.identity.index,
                "incarnation": member.incarnation,
                "state": member.state.value,
                "exchange_address": member.exchange_address,
                "measuring_address": member.measuring_address,
            }
            for member in membership.members
        ],
    }


def _membership(document: dict[str, Any]) -> Membership:
    job = JobKey(str(document["namespace"]), str(document["name"]), str(document["run_id"]))
    members = tuple(
        Member(
            WorkerIdentity(
                Rank(int(each["rank"])),
                SiteName(str(each["site"])),
                str(each["group"]),
                int(each["index"]),
            ),
            int(each["incarnation"]),
            MemberState(each["state"]),
            str(each["exchange_address"]),
            str(each["measuring_address"]),
        )
        for each in document["members"]
    )
    return Membership(int(document["version"]), job, int(document["expected_count"]), members)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""

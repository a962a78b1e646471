"""State on disk that lets a new process continue without a coordinator.

Two small files: the last membership and the incarnation counter. Both are replaced atomically; a
damaged file counts as missing.
"""

import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlion_api.atomic_file import write_atomically
from dlion_api.names import JobKey, Rank, SiteName, WorkerIdentity
from dlion_api.protocol.membership import Member, Membership, MemberState

_LOG = logging.getLogger(__name__)

MEMBERSHIP_FILE = "membership.json"
INCARNATION_FILE = "incarnation"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class SavedMembership:
    """The last membership, and the start of the run on this machine's monotonic clock."""

    membership: Membership
    start_time_monotonic_s: float


def next_incarnation(state_dir: Path | str, *, wall_clock_s: float | None = None) -> int:
    """A number for this start, higher than all earlier ones of this worker; saved on disk.

    It is the saved number plus one, or the wall clock in seconds if that is higher. A worker that
    lost its folder therefore starts above its earlier numbers, unless the clock went back. In that
    case the coordinator rejects it and reports the number it knows; `raise_incarnation` saves it,
    and the next start succeeds. Source: this project. Raises: OSError (the folder is not writable).
    """
    now_s = time.time() if wall_clock_s is None else wall_clock_s
    incarnation = max(_saved_incarnation(Path(state_dir)) + 1, int(now_s))
    write_atomically(Path(state_dir) / INCARNATION_FILE, f"{incarnation}\n".encode())
    return incarnation


def raise_incarnation(state_dir: Path | str, known: int) -> None:
    """Make the next start's number higher than `known`."""
    if known > _saved_incarnation(Path(state_dir)):
        write_atomically(Path(state_dir) / INCARNATION_FILE, f"{known}\n".encode())


def _saved_incarnation(state_dir: Path) -> int:
    path = state_dir / INCARNATION_FILE
    try:
        text = path.read_text(encoding="ascii")
        saved = int(text)
    except FileNotFoundError:
        return 0
    except ValueError:  # also UnicodeDecodeError
        _LOG.warning("%s is damaged: counting from the clock", path)
        return 0
    return max(saved, 0)


def save_membership(state_dir: Path | str, saved: SavedMembership) -> None:
    """Save the membership.

    Raises: OSError (the disk is full or the folder is not writable; the old file remains).
    """
    document = {
        "boot": _boot_id(),
        "start_time_monotonic_s": saved.start_time_monotonic_s,
        "membership": _document(saved.membership),
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    write_atomically(Path(state_dir) / MEMBERSHIP_FILE, text.encode())


def load_membership(state_dir: Path | str, job: JobKey) -> SavedMembership | None:
    """The saved membership of that run; None if there is none or it is unreadable."""
    path = Path(state_dir) / MEMBERSHIP_FILE
    try:
        document = json.loads(path.read_bytes())
        membership = _membership(document["membership"])
        # Monotonic clocks start with the machine: the time is meaningless after a reboot or
        # elsewhere.
        same_boot = document["boot"] == _boot_id()
        start_s = float(document["start_time_monotonic_s"]) if same_boot else math.nan
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _LOG.warning("%s is unreadable: continuing without it (%r)", path, error)
        return None
    return SavedMembership(membership, start_s) if membership.job == job else None


def delete_membership(state_dir: Path | str) -> None:
    """Delete the saved membership: for a run that restarts or resumes on other ports."""
    (Path(state_dir) / MEMBERSHIP_FILE).unlink(missing_ok=True)


def merge_memberships(saved: Membership | None, received: Membership) -> Membership:
    """The received membership, plus the saved members that it does not list.

    A coordinator lists the workers that joined *it*: none at first after its restart, yet the
    others are not lost. For members that it lists, it is authoritative.
    """
    if saved is None or saved.job != received.job:
        return received
    named = {member.identity.rank for member in received.members}
    others = [m for m in saved.members if m.identity.rank not in named]
    members = sorted((*received.members, *others), key=lambda member: member.identity.rank)
    return Membership(received.version, received.job, received.expected_count, tuple(members))


def _document(membership: Membership) -> dict[str, Any]:
    document = asdict(membership)
    members = [{**member.pop("identity"), **member} for member in document.pop("members")]
    return {**document.pop("job"), **document, "members": members}


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
            each.get("revoked") is True,
        )
        for each in document["members"]
    )
    return Membership(int(document["version"]), job, int(document["expected_count"]), members)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""

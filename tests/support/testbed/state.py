"""The stored state of a testbed between commands: its layout, its rates, its owner.

One folder per testbed below $DLION_TESTBED_STATE, else $XDG_STATE_HOME/dlion-testbed, else
~/.local/state/dlion-testbed. Not below /var/lib, /var/log or /run: a machine has its own there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlion_api.errors import UnavailableError
from dlion_local.emulation.compute.resource_owner import ResourceOwner
from testbed.layout import Layout, checked_name
from testbed.networks import Rates

if TYPE_CHECKING:
    from collections.abc import Iterator


def states_folder() -> Path:
    """The parent of all testbeds' folders."""
    if chosen := os.environ.get("DLION_TESTBED_STATE"):
        return Path(chosen)
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(home) / "dlion-testbed"


def folder_of(name: str) -> Path:
    """The folder of one testbed."""
    return states_folder() / checked_name(name)


def known_names() -> list[str]:
    """Testbeds that have a folder."""
    folder = states_folder()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@dataclass
class State:
    """The whole state; `save` after each change."""

    layout: Layout
    rates: Rates
    binaries: str
    """Folder of the programs it runs."""
    owner: ResourceOwner | None = None
    """The process whose end also ends the testbed; None if it stays until `down`."""

    @property
    def folder(self) -> Path:
        """Its folder."""
        return folder_of(self.layout.name)

    def save(self) -> None:
        """Write it atomically."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.folder / "state.json.new"
        new.write_text(json.dumps(asdict(self), indent=1))
        new.rename(self.folder / "state.json")

    @classmethod
    def load(cls, name: str) -> State:
        """The state of the testbed of that name. Raises: UnavailableError if there is none."""
        try:
            text = (folder_of(name) / "state.json").read_text()
        except FileNotFoundError:
            known = ", ".join(known_names()) or "none"
            raise UnavailableError(f"no testbed {name!r}; there are: {known}") from None
        data = json.loads(text)
        owner = data["owner"]
        return cls(
            layout=Layout(**data["layout"]),
            rates=Rates(**data["rates"]),
            binaries=data["binaries"],
            owner=None if owner is None else ResourceOwner(**owner),
        )


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """A lock for commands that create or remove testbeds, because they share addresses and
    names."""
    folder = states_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)

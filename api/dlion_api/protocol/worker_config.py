"""Configuration file of a worker's processes (supervisor, trainer, sidecar).

The local runner or the pod's setup writes it; each process reads it at its start. It contains paths
and addresses but no secrets: the token is in a separate file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import Problem, SpecError
from dlion_api.names import Rank

COORDINATOR_DNS_NAME = "coordinator.dlion"
"""The name in the coordinator's certificate, at any address."""

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_SOCKET_PATH_BYTES = 107
"""Linux's `sun_path` has 108 bytes with the terminating zero."""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+):([0-9]{1,5})")
_LINK = re.compile(r"(0|[1-9][0-9]{0,8})/(exchange|measuring)")


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of one worker's processes."""

    job_document: Mapping[str, Any]
    """The manifest, for `dlion_api.spec.load_job`."""
    rank: Rank
    coordinator_address: str
    """`host:port`."""
    authority_pem_path: str
    """CA bundle that verifies the coordinator's certificate; empty: no TLS."""
    token_path: str
    """File with the worker's token; read for each call, because tokens are renewed."""
    state_dir: str
    """Persists across restarts: stored membership, incarnation counter, checkpoints."""
    socket_path: str
    """The sidecar's Unix socket."""
    listen_host: str
    advertise_host: str
    """The host that peers connect to."""
    data_root: str
    """Base of relative data set paths."""
    results_dir: str
    program_root: str = ""
    """Base of `program.file` and `program.module`; empty: the data root."""
    snapshots_dir: str = ""
    """Where the trainer writes snapshots for an evaluator; empty: it evaluates itself."""
    coordinator_dns_name: str = COORDINATOR_DNS_NAME
    exchange_port: int = 0
    """The port that the trainer listens on; 0: any free one."""
    measuring_port: int = 0
    """The same for the sidecar's probes."""
    cpu_quota_cores: float | None = None
    """The hard CPU quota, if the process cannot read it; None: read the cgroup."""
    link_addresses: Mapping[str, str] = field(default_factory=dict)
    """`<rank>/exchange` or `<rank>/measuring` → address to use instead of the advertised one."""
    start_time_monotonic_s: float | None = None
    """`time.monotonic()` at the start of the run, if all share one clock; None: from the
    coordinator."""
    resume: bool = False
    keeper_address: str = ""
    """`host:port` of the site's keeper of checkpoints and models; empty: none."""

    @property
    def program_dir(self) -> Path:
        """The folder of the user's program."""
        return Path(self.program_root or self.data_root)

    @property
    def proof_dir(self) -> Path:
        """Where trainer and sidecar store the key for the proof of their token."""
        return Path(self.socket_path).parent

    def link_address(self, rank: Rank, service: Literal["exchange", "measuring"]) -> str | None:
        """Return the address to use for that peer instead of the advertised one, if any."""
        return self.link_addresses.get(f"{rank}/{service}")

    def save(self, path: Path | str) -> None:
        """Write the file atomically, readable by its owner and group.

        Raises:
            SpecError: `load` would reject a value.
            OSError: The file cannot be written.
        """
        problems = _problems(asdict(self))
        if problems:
            raise SpecError(problems, source=str(path))
        text = json.dumps(asdict(self), indent=2, allow_nan=False)
        write_atomically(Path(path), text.encode(), mode=0o640)

    @classmethod
    def load(cls, path: Path | str) -> WorkerConfig:
        """Load the configuration from a file.

        Raises:
            SpecError: Not JSON, or unknown, missing or invalid fields; lists all of them.
            OSError: The file cannot be read.
        """
        with Path(path).open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        values = _parsed(content, str(path))
        problems = _problems(values)
        if problems:
            raise SpecError(problems, source=str(path))
        return cls(**{**values, "rank": Rank(values["rank"])})


def _parsed(content: bytes, source: str) -> dict[str, Any]:
    if len(content) > MAX_CONFIG_BYTES:
        problem = Problem("", "is too long", allowed=f"at most {MAX_CONFIG_BYTES} bytes")
        raise SpecError([problem], source=source)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError covers invalid UTF-8 and JSON
        raise SpecError([Problem("", f"is not JSON: {error}")], source=source) from error
    if not isinstance(values, dict):
        problem = Problem("", "is not an object", value=type(values).__name__)
        raise SpecError([problem], source=source)
    return values


def _problems(values: Mapping[str, Any]) -> list[Problem]:
    known = {each.name: each for each in fields(WorkerConfig)}
    problems = [
        Problem(name, "unknown field", allowed=", ".join(known))
        for name in values
        if name not in known
    ]
    for name, declared in known.items():
        required = declared.default is MISSING and declared.default_factory is MISSING
        if name in values:
            wrong = _CHECKS[name](values[name])
            if wrong:
                problems.append(Problem(name, "wrong value", repr(values[name])[:200], wrong))
        elif required:
            problems.append(Problem(name, "is missing"))
    return problems


def _text(value: object) -> str:
    return "" if isinstance(value, str) else "text"


def _filled_text(value: object) -> str:
    return "" if isinstance(value, str) and value.strip() else "text that is not empty"


def _address(value: object) -> str:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match and 0 < int(match[2]) < 65536:
        return ""
    return "host:port, port 1 to 65535, an IPv6 host in brackets"


def _socket_path(value: object) -> str:
    if isinstance(value, str) and 0 < len(value.encode()) <= MAX_SOCKET_PATH_BYTES:
        return ""
    return f"a path of 1 to {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter folder"


def _rank(value: object) -> str:
    return "" if type(value) is int and value >= 0 else "an integer from 0"


def _port(value: object) -> str:
    return "" if type(value) is int and 0 <= value < 65536 else "an integer from 0 to 65535"


def _quota(value: object) -> str:
    if value is None or (_finite(value) and value > 0):  # type: ignore[operator]
        return ""
    return "cores above 0, or null"


def _moment(value: object) -> str:
    return "" if value is None or _finite(value) else "seconds, or null"


def _finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _document(value: object) -> str:
    return "" if isinstance(value, Mapping) else "a DLionJob document"


def _links(value: object) -> str:
    if isinstance(value, Mapping) and all(
        isinstance(link, str) and _LINK.fullmatch(link) and not _address(address)
        for link, address in value.items()
    ):
        return ""
    return "an object from '<rank>/exchange' or '<rank>/measuring' to 'host:port'"


_CHECKS: Mapping[str, Callable[[object], str]] = {
    "job_document": _document,
    "rank": _rank,
    "coordinator_address": _address,
    "authority_pem_path": _text,
    "token_path": _filled_text,
    "state_dir": _filled_text,
    "socket_path": _socket_path,
    "listen_host": _filled_text,
    "advertise_host": _filled_text,
    "data_root": _text,
    "results_dir": _filled_text,
    "program_root": _text,
    "snapshots_dir": _text,
    "coordinator_dns_name": _filled_text,
    "exchange_port": _port,
    "measuring_port": _port,
    "cpu_quota_cores": _quota,
    "link_addresses": _links,
    "start_time_monotonic_s": _moment,
    "resume": _flag,
    "keeper_address": lambda value: "" if value == "" else _address(value),
}
"""For each field, a function that returns the allowed values if the given one is invalid."""

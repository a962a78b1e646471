"""Configuration file of a worker's processes (supervisor, trainer, sidecar).

The local runner or the pod's setup writes it; each process reads it at its start. It contains paths
and addresses but no secrets: the token is in a separate file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from dlion_api.atomic_file import write_atomically
from dlion_api.errors import Problem, SpecError
from dlion_api.names import Rank

COORDINATOR_DNS_NAME = "coordinator.dlion"
"""The name in the coordinator's certificate, at any address."""

MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_NUMBER = 2**53
"""The maximum of cores and seconds; larger integers lose precision as floats, or overflow."""
MAX_SOCKET_PATH_BYTES = 107
"""Linux's `sun_path` has 108 bytes with the terminating zero."""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+):([0-9]{1,5})")
_LINK = re.compile(r"(0|[1-9][0-9]{0,8})/(exchange|measuring)")


def _is_address(value: Any) -> bool:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    return match is not None and 0 < int(match[2]) < 65536


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER


def _are_links(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(link, str) and _LINK.fullmatch(link) is not None and _is_address(address)
        for link, address in value.items()
    )


def _are_rates(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_finite(rate) and rate > 0 for name, rate in value.items()
    )


def _is_a(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _or_null(is_allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_allowed(value)


def _is_integer(most: float) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value <= most


def _is_filled(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _fits_socket(path: Any) -> bool:
    try:
        return isinstance(path, str) and 0 < len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
    except UnicodeEncodeError:  # no file has such a name
        return False


_HOST_PORT = "host:port, port 1 to 65535, an IPv6 host in brackets"
_SOCKET_PATH = f"a path of 1 to {MAX_SOCKET_PATH_BYTES} bytes: choose a shorter folder"
_LINKS = "an object from '<rank>/exchange' or '<rank>/measuring' to 'host:port'"

# Types of fields, each with a function that accepts its values and a description of them.
Document = Annotated[Mapping[str, Any], (_is_a(Mapping), "a DLionJob document")]
Text = Annotated[str, (_is_a(str), "text")]
FilledText = Annotated[str, (_is_filled, "text that is not empty")]
Flag = Annotated[bool, (_is_a(bool), "true or false")]
CheckedRank = Annotated[Rank, (_is_integer(math.inf), "an integer from 0")]
Port = Annotated[int, (_is_integer(65535), "an integer from 0 to 65535")]
HostPort = Annotated[str, (_is_address, _HOST_PORT)]
OptionalHostPort = Annotated[str, (lambda value: value == "" or _is_address(value), _HOST_PORT)]
LinkAddresses = Annotated[Mapping[str, str], (_are_links, _LINKS)]
Rates = Annotated[Mapping[str, float], (_are_rates, "an object from text to numbers above 0")]
SocketPath = Annotated[str, (_fits_socket, _SOCKET_PATH)]
Seconds = Annotated[float | None, (_or_null(_is_finite), "seconds, or null")]
Cores = Annotated[
    float | None,
    (_or_null(lambda value: _is_finite(value) and value > 0), "cores above 0, or null"),
]


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of one worker's processes."""

    job_document: Document
    """The manifest, for `dlion_api.spec.load_job`."""
    rank: CheckedRank
    coordinator_address: HostPort
    authority_pem_path: Text
    """CA bundle that verifies the coordinator's certificate; empty: no TLS."""
    token_path: FilledText
    """File with the worker's token; read for each call, because tokens are renewed."""
    state_dir: FilledText
    """Persists across restarts: stored membership, incarnation counter, checkpoints."""
    socket_path: SocketPath
    """The sidecar's Unix socket."""
    listen_host: FilledText
    advertise_host: FilledText
    """The host that peers connect to."""
    data_root: Text
    """Base of relative data set paths."""
    results_dir: FilledText
    program_root: Text = ""
    """Base of `program.file` and `program.module`; empty: the data root."""
    snapshots_dir: Text = ""
    """Where the trainer writes snapshots for an evaluator; empty: it evaluates itself."""
    coordinator_dns_name: FilledText = COORDINATOR_DNS_NAME
    exchange_port: Port = 0
    """The port that the trainer listens on; 0: any free one."""
    measuring_port: Port = 0
    """The same for the sidecar's probes."""
    cpu_quota_cores: Cores = None
    """The hard CPU quota, if the process cannot read it; None: read the cgroup."""
    link_addresses: LinkAddresses = field(default_factory=dict)
    """`<rank>/exchange` or `<rank>/measuring` → address to use instead of the advertised one."""
    slowest_link: Rates = field(default_factory=dict)
    """Name → bytes/s of the environment's slowest link; empty: not known."""
    start_time_monotonic_s: Seconds = None
    """`time.monotonic()` at the start of the run, if all share one clock; None: from the
    coordinator."""
    resume: Flag = False
    keeper_address: OptionalHostPort = ""
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
        if problems := _problems(asdict(self), WorkerConfig):
            raise SpecError(problems, source=str(path))
        text = json.dumps(asdict(self), indent=2, allow_nan=False)
        write_atomically(Path(path), text.encode(), mode=0o640)

    @classmethod
    def load(cls, path: Path | str) -> WorkerConfig:
        """Load the configuration from a file. Raises: as `read_config`."""
        values = read_config(path, WorkerConfig)
        return cls(**{**values, "rank": Rank(values["rank"])})


def read_config(path: Path | str, kind: type[Any]) -> dict[str, Any]:
    """Return the checked fields of a configuration of that class.

    Raises:
        SpecError: Not JSON, or unknown, missing or invalid fields; lists all of them.
        OSError: The file cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        problem = Problem("", "is too long", allowed=f"at most {MAX_CONFIG_BYTES} bytes")
        raise SpecError([problem], source=str(path))
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:  # ValueError covers invalid UTF-8 and JSON
        raise SpecError([Problem("", f"is not JSON: {error}")], source=str(path)) from error
    if problems := _problems(values, kind):
        raise SpecError(problems, source=str(path))
    return dict(values)


def _problems(values: object, kind: type[Any]) -> list[Problem]:
    if not isinstance(values, Mapping):
        return [Problem("", "is not an object", value=type(values).__name__)]
    hints = get_type_hints(kind, include_extras=True)
    allowed = ", ".join(hints)
    unknown = [name for name in values if name not in hints]
    problems = [Problem(name, "unknown field", allowed=allowed) for name in unknown]
    for declared in fields(kind):
        name = declared.name
        is_allowed, wanted = hints[name].__metadata__[0]
        if name in values:
            if not is_allowed(values[name]):
                problems.append(Problem(name, "wrong value", repr(values[name])[:200], wanted))
        elif declared.default is MISSING and declared.default_factory is MISSING:
            problems.append(Problem(name, "is missing"))
    return problems

"""A site's firewall against the other sites, on its router.

It accepts connections to its openings and answers to the site's own connections, and refuses all
others. It counts both. A site has no firewall until `open` is called. The machine of the tests can
always connect.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from socket import socket
from typing import TYPE_CHECKING

from dlion_local.emulation.network.in_namespace import in_namespace, run_tool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from testbed.layout import SiteLayout

_ANSWER_S = 2.0
_CHAIN = "other-sites"
_COUNTED = re.compile(r"\[(\d+):(\d+)\] (.*)")


@dataclass(frozen=True)
class Opening:
    """TCP ports `first` to `last` of an address, or of a network (with its prefix length)."""

    network: str
    first: int
    last: int

    @property
    def rule(self) -> str:
        """The rule that matches a connection to it."""
        return f"-p tcp -d {self.network} -m tcp --dport {self.first}:{self.last}"


@dataclass(frozen=True)
class Firewall:
    """The firewall of one site."""

    site: SiteLayout

    def open(self, *openings: Opening) -> None:
        """Accept connections to these openings only; reset all counts."""
        rules = [
            f"-s {self.site.testbed.host_address} -j ACCEPT",
            *(f"{opening.rule} -j ACCEPT" for opening in openings),
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
            "-p tcp -m tcp --syn -j REJECT --reject-with tcp-reset",
            "-j DROP",
        ]
        lines = ["*filter", f":{_CHAIN} - [0:0]", "-F INPUT", "-F FORWARD"]
        lines += [f"-A {chain} -i eth0 -j {_CHAIN}" for chain in ("INPUT", "FORWARD")]
        lines += [f"-A {_CHAIN} {rule}" for rule in rules]
        self._tool("iptables-restore", "--noflush", text="\n".join([*lines, "COMMIT", ""]))

    def taken_bytes(self) -> list[int]:
        """Received bytes of each opening, in their order."""
        return [count for _, count in self._counts()[1:-3]]

    def refused(self) -> int:
        """The number of refused connections from other sites."""
        return self._counts()[-2][0]

    def _counts(self) -> list[tuple[int, int]]:
        """Packets and bytes of each rule, in order."""
        lines = self._tool("iptables-save", "--counters", "--table", "filter").splitlines()
        found = [match for line in lines if (match := _COUNTED.fullmatch(line))]
        own = [match for match in found if match[3].startswith(f"-A {_CHAIN} ")]
        return [(int(match[1]), int(match[2])) for match in own]

    def _tool(self, program: str, *arguments: str, text: str = "") -> str:
        where = f"--net=/run/netns/{self.site.netns}"
        return run_tool("nsenter", where, program, *arguments, text=text)


def open_ports(source: SiteLayout, address: str, ports: Iterable[int]) -> set[int]:
    """The ports that accept a connection from that site's router."""

    def takes(port: int) -> bool:
        with closing(socket()) as probe:
            probe.settimeout(_ANSWER_S)
            return probe.connect_ex((address, port)) == 0

    return in_namespace(source.netns, lambda: {port for port in ports if takes(port)})

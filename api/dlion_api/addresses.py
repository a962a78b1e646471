"""How an address to dial or to listen on is spelt: `host:port`, an IPv6 host in brackets."""

from __future__ import annotations


def joined(host: str, port: int) -> str:
    """One text of both.

    >>> joined("10.0.0.7", 7440), joined("fd00::7", 7440)
    ('10.0.0.7:7440', '[fd00::7]:7440')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Network addresses: `host:port`, with an IPv6 host in brackets."""


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`.

    >>> join_host_port("10.0.0.7", 7440), join_host_port("fd00::7", 7440)
    ('10.0.0.7:7440', '[fd00::7]:7440')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, str]:
    """Return host and port of an address.

    >>> split_host_port("[fd00::7]:7440")
    ('fd00::7', '7440')
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port

"""Ports on loopback that present certificates or misbehave, for tests of clients."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlion_operator.pki.authority import ServerIdentity


@contextlib.contextmanager
def listening(
    talk: Callable[[socket.socket], object], server: socket.socket | None = None
) -> Iterator[int]:
    """A port that passes each connection to `talk` and closes it afterwards.

    `server` is a listening socket; by default a new one on loopback.
    """
    server = server or socket.create_server(("127.0.0.1", 0))
    talking: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            talk(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                talking.append(threading.Thread(target=one, args=(server.accept()[0],)))
                talking[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()
        server.close()
        for each in talking:
            each.join()


def stays_silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def presents(
    folder: Path, identity: ServerIdentity, **versions: ssl.TLSVersion
) -> Callable[[socket.socket], object]:
    """A server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, version in versions.items():
        setattr(context, name, version)
    file = folder / "server.pem"
    file.write_bytes(identity.key_pem + identity.certificate_chain_pem)
    context.load_cert_chain(file)

    def talk(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1)

    return talk

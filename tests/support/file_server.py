"""A real HTTP server on loopback that serves one file and fails on demand."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass
class ServedFile:
    """The file, the failures of the next requests, and the received requests."""

    content: bytes
    has_ranges: bool = True
    has_length: bool = True
    failures: list[int | str] = field(default_factory=list)
    """One for each coming request: a status code, `cut` (half of the content), `cut N` (N bytes),
    `reset` (half, then the connection is reset), `shift` (another range) or `redirect`."""
    authorization: str = ""
    """The header that a request must have; empty to accept any."""
    redirect_to: str = ""
    requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of each request."""
    received: threading.Event = field(default_factory=threading.Event)
    """Set by the test before a `reset`, which drops what the client has not read."""
    url: str = ""


@contextmanager
def served(
    content: bytes, name: str = "data.npz", certificate: Path | None = None
) -> Iterator[ServedFile]:
    """Serve the content under that name at a free port; over https with a certificate."""
    file = ServedFile(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _answer(self, file)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    file.url = f"{scheme}://127.0.0.1:{server.server_port}/files/{name}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield file
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_certificate(path: Path) -> Path:
    """Write a key and a self-signed certificate for 127.0.0.1."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "file server")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(pem))
    return path


def _answer(request: BaseHTTPRequestHandler, file: ServedFile) -> None:
    file.requests.append(dict(request.headers))
    failure = file.failures.pop(0) if file.failures else 200
    if file.authorization and request.headers.get("Authorization") != file.authorization:
        failure = 401
    if failure == "redirect":
        request.send_response(302)
        request.send_header("Location", file.redirect_to)
        request.end_headers()
        return
    if isinstance(failure, int) and failure != 200:
        request.send_error(failure)
        return
    start = 0
    wanted = request.headers.get("Range", "")
    if wanted and file.has_ranges:
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) + (failure == "shift")
        if start >= len(file.content):
            request.send_error(416)
            return
        request.send_response(206)
        end = len(file.content)
        request.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
    else:
        request.send_response(200)
    sent = file.content[start:]
    if file.has_length:
        request.send_header("Content-Length", str(len(sent)))
    request.end_headers()
    request.wfile.write(sent[: _sent_bytes(str(failure), len(sent))])
    if failure == "reset":
        file.received.wait(60)
        reset = struct.pack("ii", 1, 0)
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        os.close(request.connection.detach())  # before the server shuts it down in order


def _sent_bytes(failure: str, size: int) -> int:
    kind, _, count = failure.partition(" ")
    return {"cut": int(count or size // 2), "reset": size // 2}.get(kind, size)

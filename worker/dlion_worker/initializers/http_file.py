"""Gets one file over HTTP: continues where it stopped, retries, and bounds size and waiting.

Source: RFC 9110, section 14 (range requests). `urllib` takes proxies and certificates from the
environment (HTTPS_PROXY, SSL_CERT_FILE) and follows redirects.
"""

import http.client
import logging
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Protocol

from dlion_api.errors import DataError, UnavailableError
from dlion_worker.coordination.backoff import Backoff
from dlion_worker.initializers.http_opener import (
    FailedRequestError,
    SlowRequestError,
    http_opener,
    shown,
)

MAX_FAILURES: Final = 8
"""Failed requests in a row, none of which got further than those before."""
MAX_RESTARTS: Final = 8
"""How often a server may send the file from its first byte again: each time costs all of it."""
TIMEOUT_S: Final = 30.0
"""Timeout of one read from the connection. `http_opener` bounds the time of all reads."""
CHUNK_BYTES: Final = 1024 * 1024
_TEMPORARY: Final = frozenset({408, 425, 429})
_PERMANENT: Final = frozenset({501, 505})
"""The server lacks the method or the version. Every other code from 500 on is temporary."""
_UNAUTHORIZED: Final = frozenset({401, 403, 407})
_EXPIRED: Final = frozenset({400, 401, 403, 410})
"""What object stores answer to a presigned address after its time."""
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
"""OpenSSL's reasons where a server answers a handshake without TLS."""
_MAX_ANSWER_BYTES: Final = 64 * 1024
_LOG = logging.getLogger(__name__)

OnProgress = Callable[[int, int | None], None]
"""Takes the bytes so far, and those of the whole file if they are known."""


class RequestSigner(Protocol):
    """Signs each request for a file, and explains refusals (`s3_object.S3Object`)."""

    @property
    def endpoint(self) -> str:
        """Where requests go, for messages."""
        ...

    def signed_url(self) -> str:
        """Return the address of one request."""
        ...

    def explain(self, answer: bytes, server_time: str) -> str:
        """Return what the refusal's body and Date header show, and what to do."""
        ...


@dataclass
class HttpFile:
    """A file at a URL."""

    url: str
    authorization: str = ""
    """Value of the header. Other servers that the first one redirects to do not get it."""
    signer: RequestSigner | None = None
    """Gives the address of each request; None: it is `url`."""
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _restarts: int = field(default=0, init=False)

    def save(self, path: Path, *, max_bytes: int, on_progress: OnProgress) -> bool:
        """Complete the file at `path`, which may have its beginning.

        Return whether it is certainly what the server has. It may not be if its beginning was there
        before, or if the server gives no length, as a broken connection then looks like the end.
        Raises: DataError if a retry does not help; UnavailableError; OSError if the file cannot be
        written.
        """
        is_resumed = path.exists() and path.stat().st_size > 0
        backoff, failures = Backoff(initial_s=0.5, max_s=30.0), 0
        self._restarts = 0
        with path.open("ab") as file:
            received_bytes = file.tell()
            while True:
                try:
                    has_length = self._append(file, max_bytes, on_progress)
                    return has_length and not is_resumed
                except FailedRequestError as error:
                    is_slow = isinstance(error, SlowRequestError)
                    if file.tell() > received_bytes and not is_slow:
                        received_bytes, failures = file.tell(), 0
                        backoff.reset()
                    failures += 1
                    if failures > MAX_FAILURES:
                        raise UnavailableError(
                            f"{self._name}: {error}; {failures} requests failed. Check the "
                            "address and the network, then retry: it continues"
                        ) from error
                    wait_s = backoff.next_s()
                    _LOG.warning("%s: %s; retry in %.1f s", self._name, error, wait_s)
                self.pause(wait_s)

    def _append(self, file: IO[bytes], max_bytes: int, on_progress: OnProgress) -> bool:
        """Append what is missing; all of it, if the server sends no ranges.

        Return whether the server gave the length.
        """
        have = file.tell()
        with self._response(have) as response:
            if response is None:  # nothing is missing
                return True
            is_rest = response.status == 206 and _starts_at(response, have)
            if not is_rest:
                self._restart(file)
                if response.status == 206:
                    raise FailedRequestError("the server sent another range than asked for")
                have = 0
            length = _length(response)
            total = None if length is None else have + length
            self._check_size(total or 0, max_bytes)
            on_progress(have, total)
            while chunk := _read(response):
                have += len(chunk)
                self._check_size(have, max_bytes)
                file.write(chunk)
                on_progress(have, total)
            file.flush()
            if total is not None and have < total:
                raise FailedRequestError(f"the connection ended after {have} of {total} bytes")
            return total is not None

    def _restart(self, file: IO[bytes]) -> None:
        if file.tell():
            self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise UnavailableError(
                f"{self._name}: the server sends no ranges, and the connection has ended "
                f"{self._restarts} times. Use an address that takes range requests, or retry"
            )
        file.truncate(0)
        file.seek(0)

    @contextmanager
    def _response(self, have: int) -> Iterator[http.client.HTTPResponse | None]:
        """The answer to a request for what follows `have` bytes; None: nothing follows."""
        try:
            response = http_opener(self.clock).open(self._request(have), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = _answer(error)
            if error.code == 416 and have:
                yield None
                return
            raise self._failure(error, answer) from error
        except (ValueError, http.client.InvalidURL):
            # The error's text may have a header or a query, so it is neither shown nor chained.
            raise DataError(
                f"{self._name}: is, or redirects to, no valid address. Correct the address"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise DataError(
                    f"{self._name}: its certificate is not trusted: {reason.verify_message}. "
                    "Name its authority in SSL_CERT_FILE"
                ) from error
            if isinstance(reason, ssl.SSLError) and reason.reason in _NOT_TLS:
                raise DataError(
                    f"{self._name}: the server has no TLS at this port. Correct the port, or use"
                    " http://"
                ) from error
            raise FailedRequestError(str(reason) or type(reason).__name__) from error
        with response:
            yield response

    def _request(self, have: int) -> urllib.request.Request:
        url = self.url if self.signer is None else self.signer.signed_url()
        request = urllib.request.Request(url)  # noqa: S310 - the manifest's rules
        request.add_header("Accept-Encoding", "identity")
        if have:
            request.add_header("Range", f"bytes={have}-")
        if self.authorization:
            request.add_unredirected_header("Authorization", self.authorization)
        return request

    def _failure(self, error: urllib.error.HTTPError, answer: bytes) -> Exception:
        code = error.code
        status = f"HTTP {code} {error.reason}".strip()
        if code in _TEMPORARY or (code >= 500 and code not in _PERMANENT):
            return FailedRequestError(status)
        if self.signer is not None:
            explained = self.signer.explain(answer, error.headers.get("Date", ""))
            return DataError(f"{self._name}: {status}: {explained}")
        advice = "Correct the address"
        if code in _UNAUTHORIZED:
            advice = "Name a Secret with token, or username and password, in secretName"
            if self.authorization:
                advice = "Correct the credentials in the Secret of secretName"
        if "?" in self.url and code in _EXPIRED:
            advice = f"The address may have expired: get a new one. Else: {advice}"
        return DataError(f"{self._name}: {status}. {advice}")

    @property
    def _name(self) -> str:
        """The name for messages."""
        at = "" if self.signer is None else f" at {self.signer.endpoint}"
        return f"{shown(self.url)}{at}"

    def _check_size(self, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            raise DataError(
                f"{self._name}: is too large (given: {size} bytes or more; allowed: "
                f"{max_bytes} bytes). Use a smaller file, or raise the limit (docs/data.md)"
            )


def _starts_at(response: http.client.HTTPResponse, have: int) -> bool:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return match is not None and int(match[1]) == have


def _length(response: http.client.HTTPResponse) -> int | None:
    given = response.headers.get("Content-Length", "")
    return int(given) if given.isdecimal() else None


def _answer(error: urllib.error.HTTPError) -> bytes:
    """The beginning of a refusal's body, if it comes."""
    with closing(error):  # `with error` fails after too many redirects, which are closed
        try:
            return error.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, SlowRequestError):
            return b""


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        # `read` waits for all of these bytes, and drops what it has where the connection breaks.
        return response.read1(CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise FailedRequestError(str(error) or type(error).__name__) from error

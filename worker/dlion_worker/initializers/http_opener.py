"""Opens HTTP addresses of untrusted servers: secure redirects, and a least rate.

The rate counts all that a server sends: headers, the lengths of chunks, refusals and contents.
Otherwise a byte now and then would hold a request within the timeout of each read for days.
"""

import http.client
import io
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from dlion_api.errors import DataError

RATE_WINDOW_S: Final = 60.0
MIN_BYTES_PER_S: Final = 1024
"""Mean over a window."""


class FailedRequestError(Exception):
    """A request failed; another may succeed."""


class SlowRequestError(FailedRequestError):
    """The server sends, and too slowly: what came does not count as progress."""


class _SecureRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects from https to http. Credentials stay with scheme, host and port."""

    def redirect_request(self, req: Any, fp: Any, *rest: Any) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, *rest)
        if new is None:
            return None
        before, after = _origin(req.full_url), _origin(new.full_url)
        if before[0] == "https" != after[0]:
            raise DataError(f"{shown(req.full_url)}: redirects to plain http. Use another address")
        if before == after and (given := req.get_header("Authorization")):
            new.add_unredirected_header("Authorization", given)
        fp.close()  # urllib would read the redirect's body into memory, whatever its size
        return new


class _RateWindow:
    """Holds the rate of one response against the least, window by window."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        self._start_s, self._bytes = self._clock(), 0

    def add(self, count: int) -> None:
        """Raises: SlowRequestError."""
        self._bytes += count
        elapsed_s = self._clock() - self._start_s
        if elapsed_s < RATE_WINDOW_S:
            return
        if self._bytes < MIN_BYTES_PER_S * elapsed_s:
            raise SlowRequestError(f"only {self._bytes} bytes in {elapsed_s:.0f} s")
        self.restart()


class _RatedReader(io.RawIOBase):
    """Reads a socket at the least rate."""

    def __init__(self, raw: io.RawIOBase, rate: _RateWindow) -> None:
        super().__init__()
        self._raw, self._rate = raw, rate

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._raw.readinto(buffer)
        if count:
            self._rate.add(count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _RatedResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *, clock: Callable[[], float], **more: Any) -> None:
        super().__init__(sock, **more)
        self._rate = _RateWindow(clock)
        self.fp = io.BufferedReader(_RatedReader(self.fp.detach(), self._rate))

    def begin(self) -> None:
        super().begin()
        self._rate.restart()  # a server may take its time before it answers


class _RatedConnection(http.client.HTTPConnection):
    def __init__(self, host: str, *, clock: Callable[[], float] = time.monotonic, **more: Any):
        super().__init__(host, **more)
        self.response_class = partial(_RatedResponse, clock=clock)  # type: ignore[assignment]


class _RatedSecureConnection(http.client.HTTPSConnection):
    def __init__(self, host: str, *, clock: Callable[[], float] = time.monotonic, **more: Any):
        super().__init__(host, **more)
        self.response_class = partial(_RatedResponse, clock=clock)  # type: ignore[assignment]


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_RatedConnection, req, clock=self._clock)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_RatedSecureConnection, req, clock=self._clock)


def http_opener(clock: Callable[[], float]) -> urllib.request.OpenerDirector:
    """Return what opens http:// and https:// addresses.

    Opening raises what `urllib` does, SlowRequestError, and DataError for an insecure redirect.
    Reading a response raises SlowRequestError, too.
    """
    return urllib.request.build_opener(_SecureRedirects, _HttpHandler(clock), _HttpsHandler(clock))


def shown(url: str) -> str:
    """Return the address for messages: without the query, which may hold a signature."""
    return url.partition("?")[0]


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port. Raises: ValueError."""
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)

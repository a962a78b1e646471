"""A page in headless Chromium, controlled over the DevTools protocol.

For the test of the report page and for tools/report_screenshots.py. Chromium is Debian's. The
browser has its own profile and ends with the context.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

START_S = 60.0
ANSWER_S = 60.0


def chromium() -> str | None:
    """The browser's path; None if it is not installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


class BrowserPage:
    """One tab. `problems` holds console errors, exceptions and refused requests."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(
            address, timeout=ANSWER_S, suppress_origin=True, enable_multithread=False
        )
        self._count = 0
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of that command. Raises RuntimeError if the browser refuses it."""
        self._count += 1
        number = self._count
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(
        self, path: Path, *, width: int, height: int = 900, dark: bool = False, scale: float = 1.0
    ) -> None:
        """Load a file at that width and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(json.loads(self._socket.recv()))
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 150)))")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def screenshot(self, *, height: int | None = None) -> bytes:
        """Return the page from its top as PNG: `height` CSS pixels, or all."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        shot = self.call(
            "Page.captureScreenshot", clip={**clip, "scale": 1}, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self._socket.close()

    def _note(self, message: dict[str, Any]) -> None:
        self._events.append(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser_page(executable: str) -> Iterator[BrowserPage]:
    """Start a browser and return its tab."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            executable, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--no-first-run", "--disable-extensions", "--disable-background-networking",
            "--disable-dev-shm-usage", f"--user-data-dir={profile}",
            "--remote-debugging-port=0", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)
            page = BrowserPage(f"ws://127.0.0.1:{port}/devtools/page/{_target(port)}")
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            process.wait(20)


def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"the browser ended with {process.returncode}")
        if path.exists() and (lines := path.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise TimeoutError(f"the browser did not listen within {START_S:g} s")


def _target(port: int) -> str:
    """Return the id of the blank tab."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=ANSWER_S) as answer:
        tabs = json.load(answer)
    return str(next(tab["id"] for tab in tabs if tab["type"] == "page"))

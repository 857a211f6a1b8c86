"""A headless Chromium, told what to do over a pipe: how a page looks, and what is wrong with it.

It speaks the DevTools protocol: JSON that ends with a zero byte.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--remote-debugging-pipe", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars"),
)


def find_chromium() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of a running Chromium; ``problems`` is what its console, or the network, has complained about."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._rest, self._number, self._session = reads, writes, b"", 0, ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        os.write(
            self._writes, json.dumps(asked | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._reads, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        match message.get("method"), message.get("params", {}):
            case "Runtime.exceptionThrown" | "Network.loadingFailed", params:
                self.problems.append(json.dumps(params))
            case "Log.entryAdded", {"entry": entry}:
                self.problems.append(str(entry["text"]))
            case "Runtime.consoleAPICalled", {"type": "error" | "warning", "args": args}:
                self.problems.append(json.dumps(args))
        return message

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.absolute().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript is in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, full: bool = False) -> bytes:
        """Return a PNG of what is in the window, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"])


@contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Start a Chromium, and end it with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        there, here = os.pipe(), os.pipe()
        # It reads from descriptor 3 and writes to 4.
        line = f'exec "$@" 3<&{there[0]} 4>&{here[1]}'
        process = subprocess.Popen(
            ["bash", "-c", line, "bash", program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(there[0], here[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there[0])
        os.close(here[1])
        try:
            browser = Browser(here[0], there[1])
            yield browser
            browser._session = ""
            browser.call("Browser.close")
            process.wait(30)
        finally:
            process.kill()
            process.wait()
            os.close(here[0])
            os.close(there[1])

"""A headless Chromium, driven over the pipe of its debugging protocol: pages after their scripts, what they asked for, pictures."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 90  # seconds
_AT_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in zip((3, 4), ends):
    os.dup2(end, place)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Where Chromium expects the pipe."""


class Browser:
    """One tab. ``requests`` are the addresses that were asked for, ``failures`` the exceptions that no script caught."""

    def __init__(self, profile: Path) -> None:
        found = next((path for name in _NAMES if (path := shutil.which(name))), None)
        if found is None:
            pytest.skip("no chromium on PATH")
        self.requests: list[str] = []
        self.failures: list[str] = []
        self._number, self._buffer = 0, b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        command += ["--disable-background-networking", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _AT_3_AND_4, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")
        self.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def look(self, width: int = 1300, height: int = 1000, scheme: str = "light") -> None:
        """The size of the window, and the colour scheme that its user prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file anew and wait until it says that it is ready. Raises TimeoutError."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=f"file://{page}#{fragment}")
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def wait(self, condition: str) -> None:
        """Until an expression is true. Raises TimeoutError."""
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{condition} did not come true; the page threw {self.failures}")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def text(self, element: str = "main") -> str:
        """What a reader sees of an element, on one line."""
        return re.sub(r"\s+", " ", self.evaluate(f"document.querySelector({element!r}).innerText") or "")

    def picture(self, path: Path) -> None:
        """Write what is in sight as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.failures.append(json.dumps(event["params"]["exceptionDetails"])[:2000])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            got = os.read(self._in, 1 << 16)
            if not got:
                raise RuntimeError("the browser ended")
            self._buffer += got
        whole, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(whole)
        return message

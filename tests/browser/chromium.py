"""Headless Chromium driven over its debugging pipe: the DevTools protocol, NUL-terminated JSON on two descriptors.

No port, no driver program, no Python package. Network of the browser's own is switched off as far as its flags go.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--mute-audio",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and answers on 4; ours may have any numbers.
_TAKE_PIPES = """
import fcntl, os, sys
r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(r, 3), os.dup2(w, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


CODES = {"Tab": 9, "Enter": 13, "Escape": 27}
"""What Windows calls the keys that the browser itself acts on."""


class BrowserError(Exception):
    """The browser did not execute a request."""


class Browser:
    """One Chromium process with one profile of its own."""

    def __init__(self, binary: str, profile: Path) -> None:
        from_us, to_us = os.pipe(), os.pipe()
        self._write, self._read = from_us[1], to_us[0]
        argv = [
            sys.executable,
            "-c",
            _TAKE_PIPES,
            str(from_us[0]),
            str(to_us[1]),
            binary,
            *FLAGS,
            f"--user-data-dir={profile}",
        ]
        self.log = (profile / "stderr.txt").open("wb")
        self._process = subprocess.Popen(
            argv, pass_fds=(from_us[0], to_us[1]), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            env={**os.environ, "TZ": "UTC", "HOME": str(profile)},
        )  # fmt: skip
        os.close(from_us[0])
        os.close(to_us[1])
        self._buffer = b""
        self._id = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def pump(self, seconds: float) -> None:
        """Take in events for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                self.events.append(self._next(left))
            except TimeoutError:
                return

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise BrowserError("the browser has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    def page(self, width: int = 1440, height: int = 900, scheme: str = "dark", *, reduced_motion: bool = True) -> Page:
        return Page(self, width, height, scheme, reduced_motion=reduced_motion)

    def close(self) -> None:
        try:
            self.call("Browser.close")
        except (BrowserError, BrokenPipeError, TimeoutError):
            self._process.kill()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
        self.log.close()


class Page:
    """One tab of a given size and colour scheme."""

    def __init__(self, browser: Browser, width: int, height: int, scheme: str, *, reduced_motion: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self.session: str = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        if reduced_motion:
            features.append({"name": "prefers-reduced-motion", "value": "reduce"})
        self.call("Emulation.setEmulatedMedia", features=features)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self.session)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def eval(self, script: str) -> Any:
        """Value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        give_up = time.monotonic() + seconds
        while not self.eval(script):
            if time.monotonic() > give_up:
                raise BrowserError(f"still not true after {seconds} s: {script}; errors: {self.errors()}")
            self._browser.pump(0.05)

    def text(self, selector: str) -> str:
        value: str = self.eval(
            f"document.querySelector({json.dumps(selector)}).textContent.replace(/\\s+/g, ' ').trim()"
        )
        return value

    def press(self, key: str, *, alt: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=CODES.get(key, 0),
                **({"modifiers": 1, "unmodifiedText": key} if alt else {}),
            )  # fmt: skip

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def errors(self) -> list[str]:
        """Everything that the page complained about: exceptions, console errors and warnings, refused resources."""
        actual = []
        for event in self._browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                actual.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                actual.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                actual.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return actual

    def requests(self) -> list[str]:
        """URLs of everything that the page fetched."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self.session and event.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self.call("Page.close")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser, or a skip that says how to get one."""
    binary = shutil.which("chromium")
    if binary is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(binary, Path(profile))
        try:
            yield browser
        finally:
            browser.close()

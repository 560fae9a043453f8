"""Chromium without a screen, driven through its driver by the WebDriver protocol: JSON over HTTP on
this machine. A handful of commands are enough here, so no package is needed for it.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how the protocol marks an element
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_SECONDS = 60.0


def chromium() -> tuple[str, str]:
    """The browser and its driver, or an error that says what to install."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "chromium" if browser is None else "chromedriver"
        raise FileNotFoundError(
            f"tests marked browser need {missing}: apt-get install chromium chromium-driver"
        )
    return browser, driver


class Browser:
    """A window of so many pixels, light or dark as the system would have it."""

    def __init__(self, width: int, height: int, *, dark: bool = False, touch: bool = False) -> None:
        browser, driver = chromium()
        self.width = width
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._at = f"http://127.0.0.1:{port}"
        arguments = [*_ARGUMENTS, f"--window-size={width},{height}"]
        options: dict[str, Any] = {"binary": browser, "args": arguments}
        if touch:
            metrics = {"width": width, "height": height, "pixelRatio": 2, "touch": True}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        try:
            self._wait_for_driver()
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            results = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._at += f"/session/{results['sessionId']}"
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            self._devtools("Emulation.setEmulatedMedia", {"features": [scheme]})
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _wait_for_driver(self) -> None:
        end = time.monotonic() + _SECONDS
        while True:
            try:
                self._ask("GET", "/status")
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._at + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait(timeout=_SECONDS)

    def open(self, page: Path) -> None:
        """Until its script has come to its end."""
        self._ask("POST", "/url", {"url": page.resolve().as_uri()})
        end = time.monotonic() + _SECONDS
        while self.run("return document.documentElement.dataset.ready") != "yes":
            assert time.monotonic() < end, self.log()
            time.sleep(0.05)

    def run(self, script: str, *values: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(values)})

    def click(self, element: Any) -> None:
        """As a person would: the element must be there to be seen and not covered by another."""
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
        self._ask("POST", f"/element/{element[_ELEMENT]}/click")

    def press(self, element: Any, keys: str) -> None:
        self._ask("POST", f"/element/{element[_ELEMENT]}/value", {"text": keys})

    def find(self, selector: str) -> list[Any]:
        results: list[Any] = self._ask(
            "POST", "/elements", {"using": "css selector", "value": selector}
        )
        return results

    def log(self) -> list[str]:
        """What the page told the console since the last time."""
        return [each["message"] for each in self._ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Of the whole page."""
        height = self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.width, "height": height, "scale": 1}
        shot = self._devtools(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

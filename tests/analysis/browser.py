"""A real headless Chromium for tests, driven over the DevTools protocol by a pipe (no network port)."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A tab of a headless Chromium: what it evaluates, and what it complained about or asked the network for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        ours_out, theirs_in = os.pipe(), os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars", "about:blank"]
        # The browser reads commands on 3 and answers on 4.
        script = f'exec "$0" "$@" 3<&{ours_out[0]} 4>&{theirs_in[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *flags],
            pass_fds=(ours_out[0], theirs_in[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours_out[0])
        os.close(theirs_in[1])
        self._out, self._in, self._buffer, self._ids = ours_out[1], theirs_in[0], b"", itertools.count(1)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(1440, 1000)

    def call(self, method: str, *, wait: float = 60, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + wait
        while True:
            answer = self._next(end)
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            assert part, "the browser gave no answer"
            self._buffer += part
        raw, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(raw)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled":
                self.complaints.append(f"console.{params['type']}: {params['args']}")
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def open(self, page: Path, place: str = "") -> None:
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{page.resolve().as_uri()}{place}")
        self.until("document.readyState === 'complete' && document.querySelectorAll('#views canvas').length > 0")
        self.settle()

    def evaluate(self, code: str) -> Any:
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def settle(self) -> None:
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def until(self, code: str) -> None:
        end = time.monotonic() + 60
        while not self.evaluate(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.05)

    def click(self, selector: str, at: tuple[float, float] = (0.5, 0.5), modifiers: int = 0) -> None:
        """A real mouse click at a share of the element's width and height."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        where = {"x": box[0] + at[0] * box[2], "y": box[1] + at[1] * box[3], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, modifiers=modifiers, **where)
        self.settle()

    def press(self, key: str, *, text: str = "", modifiers: int = 0) -> None:
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9, "Home": 36, "Enter": 13}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def size(self, width: int, height: int, *, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)


def shown_rates(browser: Browser) -> dict[str, float]:
    rates = "[...document.querySelectorAll('#readout b')].map((b) => [b.dataset.side, +b.dataset.rate])"
    return dict(browser.evaluate(rates))


def shown_slots(browser: Browser, side: str, kind: str) -> dict[int, tuple[float, float]]:
    """Block to (score, mass) of the table's rows of class `kind`."""
    rows = browser.evaluate(f"[...document.querySelectorAll('#table-{side} tr.{kind}')].map((r) => ({{...r.dataset}}))")
    return {int(row["block"]): (float(row["score"]), float(row["mass"])) for row in rows}


def highlighted(browser: Browser, name: str) -> set[int]:
    code = f"[...document.querySelectorAll('#text .block.{name}')].map((b) => +b.dataset.block)"
    return set(browser.evaluate(code))


def set_slider(browser: Browser, name: str, value: int) -> None:
    change_value(browser, name, value, "input")


def change_value(browser: Browser, name: str, value: int, event: str) -> None:
    code = f"e.value = {value}; e.dispatchEvent(new Event('{event}'));"
    browser.evaluate(f"((e) => {{ {code} }})(document.getElementById('{name}'))")
    browser.settle()


def focus(browser: Browser) -> str:
    """The words of what has the focus."""
    return browser.evaluate("document.activeElement.textContent")

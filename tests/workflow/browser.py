"""A headless Chromium driven over its debugging pipe, with nothing but the standard library.

    python -m tests.workflow.browser report.html shots/     takes a screenshot; exit code 1 on any error

Chromium reads commands on file descriptor 3 and answers on 4, JSON texts that end with a zero byte (the DevTools
protocol). Whatever the page's scripts throw, log as an error or fail to load is kept in `errors`.
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
from pathlib import Path

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe".split()
LOCAL = ("file:", "data:", "blob:", "about:")


def find() -> str | None:
    """The browser: GEM_BROWSER, or the first of NAMES on the path."""
    return os.environ.get("GEM_BROWSER") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page of one browser process. Used as a context manager; `errors` holds what went wrong in the page."""

    def __init__(self, program: str, *, width: int = 1400, height: int = 900, timeout_s: float = 60):
        self.errors: list[str] = []
        self._buffer, self._count, self._timeout, self._loaded = b"", 0, timeout_s, False
        self._home = tempfile.TemporaryDirectory(prefix="gem-browser-", ignore_cleanup_errors=True)
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # the shell puts the pipes where Chromium looks for them
        script = f'exec "$@" 3<&{read} 4>&{write}'
        flags = [*FLAGS, f"--user-data-dir={self._home.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, "bash", program, *flags],
            pass_fds=(read, write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._home.cleanup()

    def call(self, method: str, **parameters) -> dict:
        """One command and its result. RuntimeError when the browser refuses it, ends or does not answer in time."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"browser: {method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, url: str) -> None:
        """Load a page and wait for its load event."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._next("Page.loadEventFired")

    def run(self, script: str):
        """Value of a JavaScript expression, which may be a promise; what it throws is a RuntimeError."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"browser: {_thrown(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait_for(self, script: str):
        """Value of an expression once it is true. RuntimeError when it does not become so in time."""
        end = time.monotonic() + self._timeout
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise RuntimeError(f"browser: {script} did not become true within {self._timeout:.0f} s")
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> Path:
        """A PNG of what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def _next(self, waiting_for: str) -> dict:
        """The next message; events of the page are noted."""
        end = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                why = "has ended" if ready else f"did not answer within {self._timeout:.0f} s"
                raise RuntimeError(f"browser: {why}, waiting for {waiting_for}")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, details: dict) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.errors.append(_thrown(details["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(item.get("value", item.get("description"))) for item in details["args"]))
        elif event == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.errors.append(f"{details['entry']['text']} {details['entry'].get('url', '')}".strip())
        elif event == "Network.requestWillBeSent" and not details["request"]["url"].startswith(LOCAL):
            self.errors.append(f"asks the network for {details['request']['url'][:200]}")


def _thrown(details: dict) -> str:
    return details.get("exception", {}).get("description") or details.get("text", "an exception without a text")


def main(argv: list[str]) -> int:
    page, folder = Path(argv[0]).resolve(), Path(argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with Browser(find() or sys.exit("error: no browser found; allowed: GEM_BROWSER=PATH")) as browser:
        browser.open(page.as_uri())
        print(browser.screenshot(folder / f"{page.stem}.png"))
        print("\n".join(browser.errors), file=sys.stderr)
        return 1 if browser.errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

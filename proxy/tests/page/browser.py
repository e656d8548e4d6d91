"""A headless Chromium, driven over the WebDriver protocol, which is JSON over HTTP to its driver."""

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress

from matrix.process import ENVIRONMENT

TIMEOUT = 10.0
POLL = 0.05
STARTED = re.compile(r"started successfully on port (\d+)")
# The browser resolves no names and connects to no host but this one.
ARGUMENTS = ["--headless=new", "--window-size=1400,900", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
ARGUMENTS += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]


async def until(what, check, seconds=TIMEOUT):
    """Returns the result of `check` as soon as it is true."""
    limit = time.monotonic() + seconds
    while not (result := check()):
        if time.monotonic() > limit:
            raise AssertionError(f"not after {seconds:.0f} s: {what}")
        await asyncio.sleep(POLL)
    return result


class Browser:
    def __init__(self, folder):
        """Keeps all of the browser's files in this folder."""
        self._folder = folder
        self._driver = None
        self._browser = None
        self._session = None

    async def start(self):
        if not (driver := shutil.which("chromedriver")):
            raise SystemExit("not found: chromedriver (Debian: apt-get install chromium-driver)")
        log = self._folder / "driver.log"
        with open(log, "wb") as out:
            environment = {**ENVIRONMENT, "HOME": str(self._folder), "TMPDIR": str(self._folder)}
            command = [driver, "--port=0"]
            # In its own process group, so that `end` also ends both after a keyboard interrupt.
            self._driver = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        port = (await until("the driver is listening", lambda: STARTED.search(log.read_text())))[1]
        self._session = f"http://127.0.0.1:{port}/session"
        # Chromium has no sandbox when run as root.
        arguments = [*ARGUMENTS, f"--user-data-dir={self._folder / 'profile'}", *["--no-sandbox"] * (os.geteuid() == 0)]
        wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        # On a busy machine it takes long to start.
        made = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}}, 3 * TIMEOUT)
        self._browser = made["capabilities"]["goog:processID"]
        self._session += f"/{made['sessionId']}"

    def open(self, url):
        self._ask("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """Returns the result of running a function with this body on the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def press(self, at, hold=0.0, times=1, between=0.0):
        """Presses the mouse button at this position."""
        actions = [{"type": "pointerMove", "x": at[0], "y": at[1]}]
        for _ in range(times):
            actions += [{"type": "pointerDown", "button": 0}, pause(hold), {"type": "pointerUp", "button": 0}, pause(between)]
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._ask("POST", "/actions", {"actions": [mouse]})

    def prefer(self, scheme):
        """Sets the colour scheme that the user prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})

    def picture(self, path):
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def console(self):
        """Returns the messages on the browser's console since the last call."""
        return [f"{line['level']}: {line['message']}" for line in self._ask("POST", "/se/log", {"type": "browser"})]

    async def end(self):
        if not self._driver:
            return
        try:
            if self._browser:
                self._ask("DELETE", "")
        except (AssertionError, OSError):
            # The driver has not ended the browser, so the id is still the browser's.
            with suppress(ProcessLookupError):
                os.kill(self._browser, signal.SIGKILL)
        self._driver.terminate()
        try:
            await until("the driver has exited", lambda: self._driver.poll() is not None)
        except AssertionError:
            self._driver.kill()
            self._driver.wait()

    def _ask(self, method, path, body=None, timeout=TIMEOUT):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._session + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {json.load(error)['value']['message']}") from None


def pause(seconds):
    return {"type": "pause", "duration": int(seconds * 1000)}

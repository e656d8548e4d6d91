"""The servers that clients connect to: the bare server, and the same server behind the proxy or another bridge."""

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass

from .install import NPM, PIP

TIMEOUT = 30.0
# All traffic is on 127.0.0.1.
ENVIRONMENT = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}


@dataclass(frozen=True)
class Front:
    key: str
    title: str
    # The key of the set-up that it is compared with.
    base: str | None
    # Returns the command that starts it on a port. If there is none, clients connect to `target`.
    command: object = None
    target: str = ""
    ours: bool = False


class Upstream:
    """The bare server over HTTP, shared by all fronts that forward to it."""

    def __init__(self, programs):
        self._process = subprocess.Popen([programs.load, "serve-http"], stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}/mcp"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()


class Running:
    """A running front, in its own process session."""

    def __init__(self, front, work, *options):
        self.front = front
        self.target = front.target
        self.process = None
        self._log = work / f"{front.key}.log"
        self._options = options

    def __enter__(self):
        if not self.front.command:
            return self
        port = free_port()
        self.target = f"http://127.0.0.1:{port}/mcp"
        words = [str(word) for word in self.front.command(port, self._options)]
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
            )
        until = time.monotonic() + TIMEOUT
        while not listens(port):
            if self.process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise SystemExit(f"{self.front.title} does not listen:\n{self._log.read_text()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        if self.process:
            # Its children end with their stdin, or belong to its group.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def fronts(programs, upstream):
    """Yields all set-ups, each after the one that it is compared with."""
    proxy, server = programs.proxy, [programs.load, "serve-stdio"]

    def ours(*words):
        return lambda port, options: [proxy, "--listen", f"127.0.0.1:{port}", *options, *words]

    def bridge(*words):
        return lambda port, _: [str(word).replace("PORT", str(port)) for word in words]

    yield Front("bare", "bare server", None, target=upstream.url)
    yield Front("forward", "mcp-cancel-proxy `--no-resumable`", "bare", ours("--upstream", upstream.url, "--no-resumable"), ours=True)
    yield Front("resumable", "mcp-cancel-proxy", "bare", ours("--upstream", upstream.url), ours=True)
    yield Front("pipe", "the server's own pipe", None, target="pipe")
    yield Front("stdio", "mcp-cancel-proxy", "pipe", ours("--", *server), ours=True)
    if programs.cache:
        stateful = ["--outputTransport", "streamableHttp", "--stateful", "--sessionTimeout", "600000", "--logLevel", "none"]
        yield Front(
            "supergateway",
            f"supergateway {NPM['supergateway']}",
            "pipe",
            bridge(programs.npm("supergateway"), "--stdio", " ".join(map(str, server)), *stateful, "--port", "PORT"),
        )
        yield Front(
            "python",
            f"mcp-proxy {PIP['mcp-proxy']} (Python)",
            "pipe",
            bridge(programs.pip("mcp-proxy"), "--port", "PORT", "--log-level", "ERROR", "--", *server),
        )
        stream = [programs.npm("mcp-proxy"), "--host", "127.0.0.1", "--port", "PORT", "--server", "stream"]
        for key, option in (("typescript", "--eventStore"), ("typescript-no-events", "--no-eventStore")):
            title = f"mcp-proxy {NPM['mcp-proxy']} (TypeScript) `{option}`"
            yield Front(key, title, "pipe", bridge(*stream, option, "--", *server))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0

"""A running server, usually with the proxy in front of it."""

import asyncio
import re
import signal

from matrix.process import ENVIRONMENT, Program

TIMEOUT = 30.0
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


class Serving:
    """The server for the cells of one upstream and tier."""

    def __init__(self, upstream, tier, facts, work):
        self.upstream = upstream
        self.name = f"{tier}-{upstream.key}"
        self.port = None
        self.log = work / f"{self.name}.log"
        self._tier = tier
        self._facts = facts.file(self.name)
        self._work = work
        self._server = None
        self._proxy = None

    @property
    def proxy_pid(self):
        return self._proxy.pid

    @property
    def server_pid(self):
        """The process id of an HTTP server that has been started by this object."""
        return self._server and self._server.pid

    async def start(self, proxy, options):
        command = self.upstream.command(self._facts)
        if not self.upstream.stdio:
            self._server = Program(command, self._work / f"{self.name}-server.log", print)
            self.port = (await self._server.start("listening"))["port"]
            command = ["--upstream", f"http://127.0.0.1:{self.port}/mcp"]
        else:
            command = ["--", *command]
        if self._tier == "proxy":
            self.port = await self._start_proxy([proxy, "--listen", "127.0.0.1:0", *options, *command])

    async def _start_proxy(self, command):
        with open(self.log, "wb") as log:
            self._proxy = await asyncio.create_subprocess_exec(
                *map(str, command), stdin=asyncio.subprocess.DEVNULL, stderr=log, env=ENVIRONMENT
            )
        for _ in range(int(TIMEOUT / 0.05)):
            if listening := LISTENING.search(self.log.read_text()):
                return int(listening[1])
            if self._proxy.returncode is not None:
                break
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self.name}: the proxy is not listening:\n{self.log.read_text()}")

    async def end(self):
        """Ends the proxy as a service manager would, and then the server. Returns whether the proxy exited in time,
        with exit code 0."""
        ended = True
        if self._proxy and self._proxy.returncode is None:
            self._proxy.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._proxy.wait(), TIMEOUT)
            except asyncio.TimeoutError:
                ended = False
                self._proxy.kill()
                await self._proxy.wait()
        if self._proxy:
            ended = ended and self._proxy.returncode == 0
        if self._server and self._server.runs:
            # Calls that keep running without a client would delay it.
            self._server.kill()
            await self._server.end()
        return ended


def is_running(pid):
    """Returns whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False

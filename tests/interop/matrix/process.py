"""A program that reads orders and writes events, both as lines of JSON."""

import asyncio
import json
import os
import signal
from contextlib import suppress

# A cell's answer is one line.
LINE = 1 << 24
TIMEOUT = 30
# Without proxy variables, because all traffic is on 127.0.0.1.
ENVIRONMENT = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}


class Program:
    def __init__(self, command, log, on_event, **environment):
        """Writes stderr to the file `log`, and calls `on_event` with every event after the first."""
        self._command = [str(word) for word in command]
        self._log = log
        self._on_event = on_event
        self._environment = {**ENVIRONMENT, **environment}
        self._process = None
        self._reading = None

    async def start(self, first):
        """Starts the program, waits for its first event, which must be `first`, and returns that event."""
        with open(self._log, "wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment,
                limit=LINE,
                # This lets its children be killed along with it.
                start_new_session=True,
            )
        line = await asyncio.wait_for(self._process.stdout.readline(), TIMEOUT)
        if not line:
            raise RuntimeError(f"{self._command} did not start, see {self._log}")
        event = json.loads(line)
        assert event["event"] == first, event
        self._reading = asyncio.create_task(self._read())
        return event

    def order(self, **order):
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def end(self):
        """Closes stdin and waits for the process to exit. Kills it if it does not exit in time."""
        if not self.runs:
            return
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), TIMEOUT)
        except asyncio.TimeoutError:
            self.kill()
            await self._process.wait()
        await self._reading

    @property
    def pid(self):
        return self._process.pid

    @property
    def runs(self):
        return self._process is not None and self._process.returncode is None

    def kill(self):
        """Kills the process and its children, unless it has already exited."""
        if self.runs:
            # It may have exited without asyncio having noticed yet.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self):
        while line := await self._process.stdout.readline():
            self._on_event(json.loads(line))

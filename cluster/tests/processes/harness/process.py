"""The processes in a run, which are ended by their own ids."""

import asyncio
import json
import signal
import socket

from .wire import Endpoint

TIMEOUT = 20.0


class Process:
    """A process that can be started, killed and started again."""

    def __init__(self, name, facts, work, inside=()):
        self.name = name
        self.facts = facts
        self.work = work
        # A command that starts the process elsewhere, for example in its own network.
        self._inside = list(inside)
        self._process = None
        self._lines = None

    async def launch(self, *command, lines=None):
        """Starts the process. If `lines` is given, it is called with the name and each line of stdout."""
        with open(self.work / f"{self.name}.log", "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._inside, *map(str, command), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE if lines else log,
                stderr=log, start_new_session=True,
            )
        if lines:
            self._lines = asyncio.create_task(self._read(self._process.stdout, lines))

    @property
    def pid(self):
        return self._process.pid

    @property
    def is_running(self):
        return self._process is not None and self._process.returncode is None

    async def kill(self):
        """Kills the process if it is running, and waits for it to exit."""
        if self.is_running:
            self.facts.note("killed", process=self.name)
            self._process.kill()
        await self.ended()

    def signal(self, number):
        self.facts.note("signalled", process=self.name, signal=signal.Signals(number).name)
        self._process.send_signal(number)

    async def ended(self, limit=TIMEOUT):
        """Waits for the process to exit, and kills it after `limit`."""
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), limit)
        except asyncio.TimeoutError:
            self.facts.note("broken", what=f"{self.name} did not exit")
            self._process.kill()
            await self._process.wait()
        if self._lines:
            # Waits for the lines that the process wrote before it exited.
            await self._lines
            self._lines = None

    def write(self, line):
        """Writes a line to stdin if the process is running."""
        if self.is_running:
            self._process.stdin.write(line.encode() + b"\n")

    async def _read(self, stdout, take):
        while line := await stdout.readline():
            if line.endswith(b"\n"):
                take(self.name, line)


class Node(Process):
    """An instance of the server."""

    def __init__(self, name, host, program, options, facts, work, inside=()):
        super().__init__(name, facts, work, inside)
        self.endpoint = Endpoint(name, host, free_port())
        self.peers = f"{host}:{free_port()}"
        self._command = [program, "--name", name, "--public", f"{host}:{self.endpoint.port}", "--peers", self.peers, *options]
        self._ready = None

    async def start(self, *options):
        """Starts the instance with its own options and these."""
        self._ready = asyncio.Event()
        await self.launch(*self._command, *options, lines=self._take)

    async def ready(self):
        await asyncio.wait_for(self._ready.wait(), TIMEOUT)

    async def restart(self, *options):
        await self.start(*options)
        await self.ready()

    async def leave(self):
        """Shuts the instance down in an orderly way if it is running."""
        if self.is_running:
            self.signal(signal.SIGTERM)
        await self.ended()

    @property
    def peers_at(self):
        """The address of the instance's peer listener."""
        host, _, port = self.peers.rpartition(":")
        return host, int(port)

    def release(self, tag):
        self.write(tag)

    def _take(self, name, line):
        self.facts.take(name, line)
        if json.loads(line)["event"] == "ready":
            self._ready.set()


class Redis(Process):
    """A real Redis, without persistence."""

    def __init__(self, host, facts, work, inside=()):
        super().__init__("redis", facts, work, inside)
        self.host, self.port = host, free_port()

    @property
    def url(self):
        return f"redis://{self.host}:{self.port}"

    async def start(self):
        await self.launch("redis-server", "--port", self.port, "--bind", self.host, "--save", "", "--appendonly", "no",
                          "--dir", self.work, "--protected-mode", "no")

    async def ready(self):
        """Waits until Redis answers."""
        for _ in range(int(TIMEOUT / 0.02)):
            if await self.ask("PING", 0.5) == "+PONG":
                return
            await asyncio.sleep(0.02)
        raise TimeoutError("no Redis")

    async def ask(self, line, limit=5.0):
        """Returns the response to a one-line command, or `None` if there is none."""
        async def query():
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(line.encode() + b"\r\n")
                return (await reader.readline()).decode().strip()
            finally:
                writer.close()
        try:
            return await asyncio.wait_for(query(), limit)
        except (OSError, asyncio.TimeoutError):
            return None


class Balancer(Process):
    """HAProxy, which sends each request to the next instance, without stickiness."""

    CONFIGURATION = """
global
    maxconn 8000
    stats socket {control} level admin
defaults
    mode http
    timeout connect 1s
    timeout client 10m
    timeout server 10m
    timeout check 1s
    option abortonclose
    option http-server-close
    # Without this, the start of a response is held back 200 ms for more bytes.
    option http-no-delay
    option redispatch 1
    retries 3
frontend front
    bind {endpoint.host}:{endpoint.port}
    default_backend instances
backend instances
    balance roundrobin
    default-server check inter 200ms fall 1 rise 1
{servers}
"""

    def __init__(self, host, facts, work):
        super().__init__("haproxy", facts, work)
        self.endpoint = Endpoint("front", host, free_port())
        self._control = work / "haproxy.sock"

    async def start(self, nodes):
        servers = "\n".join(f"    server {node.name} {node.endpoint.host}:{node.endpoint.port}" for node in nodes)
        path = self.work / "haproxy.cfg"
        path.write_text(self.CONFIGURATION.format(endpoint=self.endpoint, control=self._control, servers=servers))
        await self.launch("haproxy", "-db", "-f", path)
        for _ in range(int(TIMEOUT / 0.05)):
            try:
                (await asyncio.open_connection(self.endpoint.host, self.endpoint.port))[1].close()
                return
            except OSError:
                await asyncio.sleep(0.05)
        raise TimeoutError("no HAProxy")

    async def take_out(self, node):
        """Sends this instance no new connections, as before any orderly deployment."""
        await self._send(f"disable server instances/{node.name}")

    async def put_back(self, node):
        await self._send(f"enable server instances/{node.name}")

    async def cut(self, node):
        """Closes all connections served by this instance at once."""
        await self._send(f"shutdown sessions server instances/{node.name}")

    async def _send(self, command):
        reader, writer = await asyncio.open_unix_connection(self._control)
        writer.write(command.encode() + b"\n")
        reply = (await reader.read()).decode().strip()
        writer.close()
        if reply:
            self.facts.note("broken", what=f"haproxy: {command}: {reply}")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

"""The Python SDK, 1.x or 2.x, as a server with one tool, which works for a while and records its outcome.

    python server.py FACTS stdio|session|json|store|stateless [sync]

`json` is `session` with answers in JSON, and `store` has an event store. `sync` has a tool that is an ordinary function
and cannot be stopped. Over HTTP, the first line on stdout is the port.
"""

import asyncio
import json
import os
import socket
import sys
import time
from importlib.metadata import version

import anyio
import uvicorn
from mcp.server.streamable_http import EventMessage, EventStore

SDK_1 = version("mcp").startswith("1.")
FACTS, MODE, *MORE = sys.argv[1:]


def note(event, **more):
    line = json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **more}) + "\n"
    with open(FACTS, "a") as facts:
        facts.write(line)


class Store(EventStore):
    """All events of all streams. An id is a number that does not identify its stream."""

    def __init__(self):
        self.events = []

    async def store_event(self, stream_id, message):
        self.events.append((stream_id, message))
        return str(len(self.events) - 1)

    async def replay_events_after(self, last_event_id, send_callback):
        stream = self.events[int(last_event_id)][0]
        for number, (owner, message) in enumerate(list(self.events)):
            if number > int(last_event_id) and owner == stream and message is not None:
                await send_callback(EventMessage(message, str(number)))
        return stream


def seconds(cell):
    return float(cell.rpartition("/")[2])


async def work(cell: str, bytes: int) -> str:
    note("started", cell=cell)
    try:
        await anyio.sleep(seconds(cell))
    except anyio.get_cancelled_exc_class():
        note("cancelled", cell=cell)
        raise
    note("finished", cell=cell)
    return cell.ljust(bytes, ".")


def work_synchronously(cell: str, bytes: int) -> str:
    note("started", cell=cell)
    time.sleep(seconds(cell))
    note("finished", cell=cell)
    return cell.ljust(bytes, ".")


async def serve(server):
    if SDK_1:
        application = server.streamable_http_app()
    else:
        application = server.streamable_http_app(**OPTIONS)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print(json.dumps({"event": "listening", "port": listener.getsockname()[1]}), flush=True)
    config = uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=1)
    await uvicorn.Server(config).serve(sockets=[listener])


OPTIONS = {
    "stateless_http": MODE == "stateless",
    "json_response": MODE == "json",
    "event_store": Store() if MODE == "store" else None,
}


def main():
    note("born")
    if SDK_1:
        from mcp.server.fastmcp import FastMCP

        server = FastMCP("real", **OPTIONS)
    else:
        from mcp.server.mcpserver import MCPServer

        server = MCPServer("real")
    server.add_tool(work_synchronously if MORE == ["sync"] else work, name="work")
    if MODE == "stdio":
        server.run("stdio")
    else:
        asyncio.run(serve(server))


main()

"""The Python SDK, 1.x or 2.x, as the client in several concurrent cells.

    python client.py [legacy]

`legacy` restricts SDK 2.x to sessions, which it otherwise uses only with servers without 2026-07-28. Orders are lines
of JSON on stdin. {"open": cell, "url", "arguments", "timeout"} connects and calls the tool. {"close": cell} and
{"delete": cell} end it; they are the same, because SDK 1.x deletes its session when it is closed. With SDK 1.x,
{"cancel": cell} cancels the call. Events are written to stdout.
"""

import asyncio
import json
import logging
import os
import sys
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.metadata import version

SDK_1 = version("mcp").startswith("1.")
if SDK_1:
    from mcp import ClientSession, types
    from mcp.client.streamable_http import streamable_http_client
else:
    from mcp import Client

LEGACY = "legacy" in sys.argv[1:]
# SDK 1.x numbers its requests, and `initialize` was number 0.
CALL = 1

# The connected clients, by cell.
clients = {}


def emit(event, **more):
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


@asynccontextmanager
async def connection(url, timeout):
    if SDK_1:
        async with streamable_http_client(url) as (read, write, _):
            async with ClientSession(read, write, timedelta(seconds=timeout)) as session:
                await session.initialize()
                yield session
    else:
        mode = {"mode": "legacy"} if LEGACY else {}
        async with Client(url, read_timeout_seconds=timeout, **mode) as client:
            yield client


async def serve(order):
    cell = order["open"]
    answered = False
    progress = []

    async def seen(step, total, message):
        progress.append(step)

    try:
        async with connection(order["url"], order["timeout"]) as client:
            clients[cell] = client
            try:
                result = await client.call_tool("work", order["arguments"], progress_callback=seen)
                emit("outcome", cell=cell, text=result.content[0].text, progress=progress)
            except Exception as error:
                emit("outcome", cell=cell, error=repr(error))
            answered = True
            await asyncio.Event().wait()
    except BaseException as error:
        # The connection has failed, and with it the task that was waiting for the answer.
        print(f"{cell}: {error!r}", file=sys.stderr)
        if not answered:
            emit("outcome", cell=cell, error=repr(error))
    emit("closed", cell=cell)


async def cancel(cell):
    """SDK 1.x has no method that sends a cancel."""
    params = types.CancelledNotificationParams(requestId=CALL)
    await clients[cell].send_notification(types.ClientNotification(types.CancelledNotification(params=params)))


async def main():
    stdin = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    cells = {}
    cancels = []
    emit("ready")
    while line := await stdin.readline():
        order = json.loads(line)
        if "open" in order:
            cells[order["open"]] = asyncio.create_task(serve(order))
        elif "cancel" in order:
            # If the connection has failed, this waits for a new one.
            cancels.append(asyncio.create_task(cancel(order["cancel"])))
        elif (cell := order.get("close") or order["delete"]) in cells:
            # Does what Ctrl-C does to a program that is waiting for its call.
            cells[cell].cancel()
    os._exit(0)


if __name__ == "__main__":
    if os.environ.get("INTEROP_LOG"):
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(message)s")
    asyncio.run(main())

"""The Python SDK, 1.x or 2.x, as the client of any number of cells at once.

    python client.py [legacy]

`legacy` keeps SDK 2.x to sessions, which it otherwise has only with servers that do not know 2026-07-28.
Orders come as lines of JSON on standard input: {"open": cell, "url", "arguments", "timeout"}, which connects and calls the tool,
and then {"close": cell} or {"delete": cell}, which is the same, as SDK 1.x deletes its session when it is closed; with SDK 1.x
also {"cancel": cell} for its call. What happens goes to standard output.
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
# SDK 1.x counts them: `initialize` was 0.
CALL = 1

# Of each cell that is connected.
clients = {}


def tell(event, **more):
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
                tell("outcome", cell=cell, text=result.content[0].text, progress=progress)
            except Exception as error:
                tell("outcome", cell=cell, error=repr(error))
            answered = True
            await asyncio.Event().wait()
    except BaseException as error:
        # The connection is gone, and with it the task that waited for the answer.
        print(f"{cell}: {error!r}", file=sys.stderr)
        if not answered:
            tell("outcome", cell=cell, error=repr(error))
    tell("closed", cell=cell)


async def cancel(cell):
    """SDK 1.x has no method for it."""
    params = types.CancelledNotificationParams(requestId=CALL)
    await clients[cell].send_notification(types.ClientNotification(types.CancelledNotification(params=params)))


async def main():
    stdin = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    cells = {}
    cancels = []
    tell("ready")
    while line := await stdin.readline():
        order = json.loads(line)
        if "open" in order:
            cells[order["open"]] = asyncio.create_task(serve(order))
        elif "cancel" in order:
            # Where the connection is gone this waits for it.
            cancels.append(asyncio.create_task(cancel(order["cancel"])))
        elif (cell := order.get("close") or order["delete"]) in cells:
            # What Ctrl-C does to a program that waits for its call.
            cells[cell].cancel()
    os._exit(0)


if __name__ == "__main__":
    if os.environ.get("INTEROP_LOG"):
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(message)s")
    asyncio.run(main())

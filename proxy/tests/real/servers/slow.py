"""A server for many concurrent calls that uses no SDK. It works for as long as a call requests, obeys cancels, and
records everything.

    python slow.py FACTS stdio|session

Over HTTP it has sessions but no event ids. Like the SDKs, it keeps working after a disconnect, and its later messages
are lost. A cancelled call is not answered, and the stream of every other cancelled call stays open. The first line on
stdout is then the port.
"""

import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests" / "interop"))

FACTS, MODE = sys.argv[1:]
PROGRESS = 0.2
LINE = 1 << 22


def note(event, **more):
    with open(FACTS, "a") as facts:
        facts.write(json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **more}) + "\n")


class Session:
    """One client's calls."""

    def __init__(self):
        self.calls = {}

    async def call(self, message, say):
        """Works, sending progress and the answer."""
        cell = message["params"]["arguments"]["cell"]
        token = message["params"]["_meta"]["progressToken"]
        left, step = message["params"]["arguments"]["seconds"], 0
        while left > 0:
            await asyncio.sleep(min(left, PROGRESS))
            left -= PROGRESS
            step += 1
            progress = {"progressToken": token, "progress": step, "message": cell}
            say({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
        note("finished", cell=cell)
        text = cell.ljust(message["params"]["arguments"]["bytes"], ".")
        say({"jsonrpc": "2.0", "id": message["id"], "result": {"content": [{"type": "text", "text": text}]}})

    def begin(self, message, say):
        cell = message["params"]["arguments"]["cell"]
        note("started", cell=cell)
        call = asyncio.ensure_future(self.call(message, say))
        self.calls[message["id"]] = call

        def over(call):
            del self.calls[message["id"]]
            # Also for a call that was cancelled before its first step.
            if call.cancelled():
                note("cancelled", cell=cell)

        call.add_done_callback(over)
        return call

    def take(self, message):
        """Accepts a message that is not a call. Returns the answer to `initialize`, and `None` for anything else."""
        if message.get("method") == "notifications/cancelled":
            if call := self.calls.get(message["params"]["requestId"]):
                call.cancel()
        elif message.get("method") == "initialize":
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "slow", "version": "0"}
            return {"jsonrpc": "2.0", "id": message["id"], "result": result}
        return None

    async def end(self):
        calls = list(self.calls.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def printed(message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def on_stdio():
    stdin = asyncio.StreamReader(limit=LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    session = Session()
    while line := await stdin.readline():
        message = json.loads(line)
        if message.get("method") == "tools/call":
            session.begin(message, printed)
        elif answer := session.take(message):
            printed(answer)
    await session.end()


async def serve(sessions, reader, writer):
    from matrix.wire import Requests

    def answer(status, body=b"", *headers):
        head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    requests = Requests()
    try:
        while data := await reader.read(1 << 16):
            for method, headers, body in requests.feed(data):
                session = sessions.get(headers.get("mcp-session-id"))
                if method == "POST":
                    message = json.loads(body)
                    if message.get("method") == "initialize":
                        key = str(uuid.uuid4())
                        sessions[key] = Session()
                        said = json.dumps(sessions[key].take(message)).encode()
                        answer("200 OK", said, "content-type: application/json", f"mcp-session-id: {key}")
                    elif session is None:
                        answer("404 Not Found")
                    elif message.get("method") == "tools/call":
                        await stream(session, message, writer)
                    else:
                        session.take(message)
                        answer("202 Accepted")
                elif method == "DELETE" and session:
                    del sessions[headers["mcp-session-id"]]
                    await session.end()
                    answer("200 OK")
                else:
                    answer("405 Method Not Allowed" if session else "404 Not Found")
    except OSError:
        pass
    finally:
        writer.close()


async def stream(session, message, writer):
    """Sends a call's events, which are lost while the client is disconnected."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def say(event):
        data = b"event: message\ndata: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    call = session.begin(message, say)
    await asyncio.wait([call])
    if not call.cancelled() or message["id"] % 2:
        writer.write(b"0\r\n\r\n")
    else:
        # Stays open until the client closes it.
        await writer.wait_closed()


async def on_http():
    sessions = {}
    server = await asyncio.start_server(lambda *ends: serve(sessions, *ends), "127.0.0.1", 0, limit=LINE)
    print(json.dumps({"event": "listening", "port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


note("born")
asyncio.run(on_stdio() if MODE == "stdio" else on_http())

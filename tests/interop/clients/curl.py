"""curl, as a shell script would use it, as the client in several concurrent cells.

It opens a session, listens on the standalone stream, and calls the tool. When the connection breaks, it waits for the
server's reconnect delay and resumes with Last-Event-ID, until it has the answer or its time is up. Orders are lines of
JSON on stdin: {"open": cell, "url", "arguments", "timeout"} and {"close": cell}. Events are written to stdout.
"""

import asyncio
import json
import os
import sys
import time

ACCEPT = "accept: application/json, text/event-stream"
REVISION = "2025-06-18"


def emit(event, **more):
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


class Caller:
    def __init__(self, url):
        self.url = url
        self.headers = [ACCEPT, "content-type: application/json"]
        self.last_event_id = None
        self.retry = 1.0
        self.progress = []
        self.processes = []

    async def connect(self):
        """Opens a session and its standalone stream."""
        hello = {"protocolVersion": REVISION, "capabilities": {}, "clientInfo": {"name": "curl", "version": "0"}}
        curl = await self.start("-D-", *self.post("initialize", hello, id=0))
        output, _ = await curl.communicate()
        fields = dict(line.split(": ", 1) for line in output.decode().split("\r\n")[1:] if ": " in line)
        self.headers += [f"mcp-session-id: {fields['mcp-session-id']}", f"mcp-protocol-version: {REVISION}"]
        curl = await self.start(*self.post("notifications/initialized"))
        await curl.communicate()
        await self.start()

    async def call(self, arguments):
        """Calls the tool and returns the answer, resuming as often as it takes."""
        work = {"name": "work", "arguments": arguments, "_meta": {"progressToken": 1}}
        ask = self.post("tools/call", work, id=1)
        while True:
            curl = await self.start(*ask)
            if answer := await self.read(curl):
                return answer
            await asyncio.sleep(self.retry)
            ask = ["-H", f"last-event-id: {self.last_event_id}"]

    async def read(self, curl):
        """Returns the answer, or `None` if the stream ends without one."""
        while line := await curl.stdout.readline():
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "id":
                self.last_event_id = value
            elif field == "retry":
                self.retry = int(value) / 1000
            elif field == "data" and line.endswith(b"\n"):
                message = json.loads(value or "{}")
                if message.get("method") == "notifications/progress":
                    self.progress.append(message["params"]["progress"])
                elif message.get("id") == 1:
                    return message

    def post(self, method, params=None, **more):
        message = {"jsonrpc": "2.0", "method": method, **more}
        return ["-d", json.dumps(message if params is None else {**message, "params": params})]

    async def start(self, *args):
        headers = (word for header in self.headers for word in ("-H", header))
        process = await asyncio.create_subprocess_exec(
            "curl", "-sN", "--noproxy", "*", *headers, *args, self.url, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        self.processes.append(process)
        return process

    def kill(self):
        for process in self.processes:
            if process.returncode is None:
                process.kill()


async def serve(order):
    cell = order["open"]
    caller = Caller(order["url"])
    try:
        await caller.connect()
        answer = await asyncio.wait_for(caller.call(order["arguments"]), order["timeout"])
        if "error" in answer:
            emit("outcome", cell=cell, error=json.dumps(answer["error"]))
        else:
            emit("outcome", cell=cell, text=answer["result"]["content"][0]["text"], progress=caller.progress)
        await asyncio.Event().wait()
    except Exception as error:
        emit("outcome", cell=cell, error=repr(error))
        await asyncio.Event().wait()
    finally:
        caller.kill()
        emit("closed", cell=cell)


async def main():
    stdin = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    tasks = {}
    emit("ready")
    while line := await stdin.readline():
        order = json.loads(line)
        if "open" in order:
            tasks[order["open"]] = asyncio.create_task(serve(order))
        else:
            tasks[order["close"]].cancel()
    os._exit(0)


asyncio.run(main())

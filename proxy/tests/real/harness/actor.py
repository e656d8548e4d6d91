"""Raw clients that connect and disconnect as no proper client would, and record what they do and observe."""

import asyncio
import json
import random

TIMEOUT = 30.0
LINE = 1 << 22
GRACE = 2.0
# A tool that works for this many seconds never finishes within a story.
LONG = 25.0
STORIES = ["stay", "stay", "quick", "gone", "gone", "early", "resume", "resume", "late", "after", "cancel", "delete"]


class Response:
    """One request on its own connection."""

    async def open(self, port, method, headers, body=b""):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port, limit=LINE)
        lines = [f"{method} /mcp HTTP/1.1", f"host: 127.0.0.1:{port}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()
        return self

    async def head(self):
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = dict(line.lower().split(": ", 1) for line in lines if line)
        return self

    async def events(self):
        """Yields each event's id and data."""
        event_id, data, rest = None, "", b""
        async for chunk in self._chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                field, _, value = line.decode().partition(":")
                if field == "id":
                    event_id = value.strip()
                elif field == "data":
                    data += value.strip()
                elif not line:
                    yield event_id, data
                    event_id, data = None, ""

    async def _chunks(self):
        if length := int(self.headers.get("content-length", 0)):
            yield await self.reader.readexactly(length)
            return
        while size := int(await self.reader.readline() or b"0", 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)

    def close(self):
        self.writer.close()


class Actor:
    def __init__(self, name, port, facts, seed, until):
        self.name = name
        self._port = port
        self._facts = facts
        self._dice = random.Random(f"{seed} {name}")
        self._until = until
        self._session = None
        self._tag = None
        self._next = 0

    async def run(self):
        loop = asyncio.get_running_loop()
        turn = 0
        while loop.time() < self._until:
            turn += 1
            self._tag = f"{self.name}.{turn}"
            try:
                await asyncio.wait_for(self._visit(), 4 * TIMEOUT)
            except Exception as error:
                self._facts.note("broke", tag=self._tag, error=repr(error))

    async def _visit(self):
        """Plays stories in a new session, or waits a moment if there is no room for one. Usually ends the session."""
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "actor", "version": "0"}}
        self._session, self._next = None, 0
        response = await self._post("initialize", hello, id=0)
        if response.status == 503:
            # There is no room for a session at the moment.
            response.close()
            await asyncio.sleep(0.5)
            return
        self._session = response.headers["mcp-session-id"]
        response.close()
        (await self._post("notifications/initialized", {})).close()
        for _ in range(self._dice.randint(1, 4)):
            stories = [self._dice.choice(STORIES) for _ in range(self._dice.randint(1, 3))]
            await asyncio.gather(*(self._call(story) for story in stories if story != "delete"))
            if "delete" in stories:
                await self._call("delete")
                return
        if self._dice.random() < 0.9:
            await self._delete()

    async def _call(self, story):
        self._next += 1
        number, dice = self._next, self._dice
        cell = f"{self._tag}/{number}/{story}"
        seconds = {
            "stay": dice.uniform(0.0, 1.0), "quick": 0.0, "resume": dice.uniform(1.5, 3.5), "late": 0.5, "after": 0.5,
        }.get(story, LONG)
        size = dice.choice([50, 50, 2_000, 60_000])
        self._note("asked", cell, seconds=seconds)
        params = {"name": "work", "arguments": {"cell": cell, "seconds": seconds, "bytes": size}}
        params["_meta"] = {"progressToken": number}
        response = await self._post("tools/call", params, id=number, head=story != "early")
        if story == "early":
            self._leave(cell, response)
            return
        if response.status != 200:
            self._note("refused", cell, status=response.status)
            response.close()
            return
        if story in ("stay", "quick"):
            await self._answer(cell, response, size, None)
            return
        # Reads until there is an event id to resume from.
        last = await self._answer(cell, response, size, None, until=dice.uniform(0.1, 0.4))
        if last is None:
            # On a busy machine the answer might arrive before the client disconnects.
            return
        if story == "cancel":
            self._note("told", cell)
            (await self._post("notifications/cancelled", {"requestId": number})).close()
            await asyncio.sleep(1.0)
            response.close()
        elif story == "delete":
            await self._delete()
            response.close()
        else:
            self._leave(cell, response)
        if story in ("resume", "late", "after"):
            for _ in range(dice.randint(0, 2) if story == "resume" else 0):
                await asyncio.sleep(dice.uniform(0.0, 0.8))
                response = await self._back(cell, last)
                last = await self._answer(cell, response, size, last, until=dice.uniform(0.0, 0.3))
                if last is None:
                    return
                self._leave(cell, response)
            wait = {"resume": dice.uniform(0.0, 1.0), "late": 1.2, "after": GRACE + 1.0}[story]
            await asyncio.sleep(wait)
            await self._answer(cell, await self._back(cell, last), size, last)

    async def _back(self, cell, last):
        # Recorded before the request is sent, because the proxy may receive it right away.
        self._note("back", cell)
        response = await Response().open(self._port, "GET", {**self._headers(), "last-event-id": last})
        return await response.head()

    async def _answer(self, cell, response, size, last, until=TIMEOUT):
        """Reads for up to this many seconds. Returns the last event id, or `None` once the answer has arrived."""
        async def read():
            nonlocal last
            async for event_id, data in response.events():
                last = event_id or last
                message = json.loads(data or "{}")
                owner = message.get("params", {}).get("message")
                if "result" in message:
                    owner = message["result"]["content"][0]["text"]
                    self._note("answered", cell, right=owner == cell.ljust(size, "."))
                    owner = owner.rstrip(".")
                if owner is not None and owner != cell:
                    self._note("crossed", cell, of=owner)
                if "result" in message:
                    last = None
                    response.close()
                    return
                if "error" in message:
                    self._note("failed", cell, error=message["error"])
        if response.status != 200:
            self._note("refused", cell, status=response.status, body=(await response.reader.read(300)).decode())
            return last
        try:
            await asyncio.wait_for(read(), until)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        return last

    def _leave(self, cell, response):
        response.close()
        self._note("left", cell)

    async def _delete(self):
        # Ends the session's remaining calls.
        self._facts.note("deleted", tag=self._tag)
        response = await Response().open(self._port, "DELETE", self._headers())
        await response.head()
        if response.status not in (200, 204):
            self._facts.note("broke", tag=self._tag, error=f"DELETE {response.status}")
        response.close()

    async def _post(self, method, params, head=True, **more):
        message = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more})
        response = await Response().open(self._port, "POST", self._headers(), message.encode())
        return await asyncio.wait_for(response.head(), TIMEOUT) if head else response

    def _headers(self):
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        return headers if self._session is None else {**headers, "mcp-session-id": self._session}

    def _note(self, event, cell, **more):
        self._facts.note(event, cell=cell, **more)

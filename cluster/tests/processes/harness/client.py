"""Clients: their sessions, and their calls, which are cut off and resumed."""

import asyncio
import json

from .wire import Broken, Response

CAPABILITIES = {"sampling": {}, "elicitation": {}}
# Timeout for operations that involve no waiting.
TIMEOUT = 30.0
# Temporary statuses, after which the client pauses and retries.
BUSY = (502, 503, 504)
RETRY_DELAY = 0.2
# How soon a live session has to answer, even if its owner has failed.
ANSWERS_TIMEOUT = 10.0


class Session:
    def __init__(self, facts, session_id):
        self.facts = facts
        self.id = session_id
        self._next = 0

    @classmethod
    async def open(cls, facts, endpoint):
        """Opens a session, retrying for a limited time."""
        params = {"protocolVersion": "2025-11-25", "capabilities": CAPABILITIES,
                  "clientInfo": {"name": "client", "version": "0"}}
        self = cls(facts, None)
        for _ in range(int(TIMEOUT / RETRY_DELAY)):
            try:
                response = await self.post(endpoint, {"method": "initialize", "id": "hello", "params": params})
            except Broken:
                response = None
            if response and response.status == 200:
                self.id = response.headers["mcp-session-id"]
                await response.text()
                await self.notify(endpoint, "notifications/initialized")
                facts.note("session", session=self.id, endpoint=endpoint.name)
                return self
            await asyncio.sleep(RETRY_DELAY)
        raise TimeoutError(f"no session through {endpoint.name}")

    async def post(self, endpoint, message, more=(), until=None):
        """Sends a message, and returns the response once its head has arrived. If `until` is given, the second half is
        not sent until that is set."""
        body = body_of(message)
        response = await Response.open(endpoint, "POST", self.headers(more), body, kept=len(body) // 2 if until else 0)
        if until:
            await until.wait()
            response.send_rest()
        return await response.head()

    async def notify(self, endpoint, method, params=None, limit=TIMEOUT):
        """Sends a notification and returns the status, or 0 if there is none."""
        message = {"method": method, **({"params": params} if params else {})}
        return await self._status(self.post(endpoint, message), limit)

    async def reply(self, endpoint, question, result):
        """Answers a request from the server and returns the status, or 0 if there is none."""
        return await self._status(self.post(endpoint, {"id": question["id"], "result": result}), TIMEOUT)

    async def delete(self, endpoint):
        """Deletes the session and returns the status, or 0 if there is none."""
        async def send():
            return await (await Response.open(endpoint, "DELETE", self.headers())).head()
        return await self._status(send(), TIMEOUT)

    async def poke(self, endpoint, limit=TIMEOUT):
        """Checks whether the endpoint can find the session, and returns the status, or 0 if there is none."""
        status = await self.notify(endpoint, "notifications/roots/list_changed", limit=limit)
        self.facts.note("poked", session=self.id, endpoint=endpoint.name, status=status)
        return status

    async def whose(self, endpoint, group):
        """Asks which instance serves the session and returns its name, or `None` if no instance answers in time. After
        a 503 it retries shortly afterwards."""
        for _ in range(int(ANSWERS_TIMEOUT / RETRY_DELAY)):
            status, name = await self._whoami(endpoint)
            if status != 503:
                break
            await asyncio.sleep(RETRY_DELAY)
        self.facts.note("whose", session=self.id, endpoint=endpoint.name, group=group, status=status, name=name)
        return name

    async def _whoami(self, endpoint):
        """Calls the tool that names its instance, and returns the status, or 0 if there is none, and the name."""
        name, status = None, 0
        self._next += 1
        params = {"name": "whoami", "arguments": {}}
        try:
            sent = self.post(endpoint, {"method": "tools/call", "id": self._next, "params": params})
            response = await asyncio.wait_for(sent, TIMEOUT)
            status = response.status
            async for _, data in response.events():
                message = json.loads(data or "{}")
                if "result" in message:
                    name = message["result"]["content"][0]["text"]
        except Broken:
            pass
        return status, name

    def headers(self, more=()):
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json", **dict(more)}
        return headers if self.id is None else {**headers, "mcp-session-id": self.id}

    def next_id(self):
        """Returns the next request's id. Every third id is a string."""
        self._next += 1
        return f"n {self._next}" if self._next % 3 == 0 else self._next

    async def _status(self, sent, limit):
        try:
            response = await asyncio.wait_for(sent, limit)
        except Broken:
            return 0
        response.cut()
        return response.status


class Call:
    """A call in a session. What its client does and observes is recorded as facts."""

    count = 0

    def __init__(self, session, scenario, story, tool="work", size=60, events=3, **arguments):
        Call.count += 1
        self.session = session
        self.tag = f"{scenario}/{story}/{Call.count}"
        self.id = session.next_id()
        self._size, self._events = size, events
        self._params = {
            "name": tool, "_meta": {"progressToken": f"progress for {self.tag}"},
            "arguments": {"tag": self.tag, "bytes": size, "events": events, **arguments},
        }
        self._plan = {"scenario": scenario, "story": story}
        self._last = None
        self._progress = []
        self._stream = None
        self._pump = None
        self._streaming = asyncio.Event()
        self._quiet = asyncio.Event()
        self._over = asyncio.Event()
        self.question = asyncio.get_running_loop().create_future()

    async def ask(self, endpoint, until_started=True, until=None):
        """Calls the tool. With `until_started`, returns once the client has all events except the answer.

        If `until` is given, the second half of the first request is not sent until that is set."""
        self._note_asked(endpoint)
        for _ in range(int(TIMEOUT / RETRY_DELAY)):
            try:
                response = await self.session.post(endpoint, self._message(), until=until)
            except Broken as error:
                # The call may have started, so it is not sent again.
                self._note("refused", status=0, what=repr(error), endpoint=endpoint.name)
                return self
            if response.status == 200:
                self._attach(response)
                break
            self._note("refused", status=response.status, endpoint=endpoint.name)
            response.cut()
            until = None
            if response.status != 503:
                return self
            await asyncio.sleep(RETRY_DELAY)
        if until_started:
            await asyncio.wait_for(self._quiet.wait(), TIMEOUT)
        return self

    async def ask_half(self, endpoint, limit):
        """Sends half of the call and stays connected. Returns when the call has been answered or its client cut off, or
        after `limit`."""
        self._note_asked(endpoint)
        body, status = body_of(self._message()), 0
        try:
            self._stream = await Response.open(endpoint, "POST", self.session.headers(), body, kept=len(body) // 2)
            status = (await self._stream.head(limit)).status
        except Broken as error:
            self._note("cut off", how=repr(error))
        self._note("refused", status=status, endpoint=endpoint.name)

    def cut(self, reset=False):
        """Disconnects the client."""
        self._detach()
        self._note("cut", reset=reset, last=self._last)
        self._stream.cut(reset)

    async def resume(self, endpoint, limit=TIMEOUT, obeys=False):
        """Has the client resume, retrying after temporary failures. If `obeys`, it waits as long as `Retry-After` asks.

        Returns whether it was accepted within `limit`."""
        self._detach()
        self._note("resuming", endpoint=endpoint.name)
        deadline = asyncio.get_running_loop().time() + limit
        while asyncio.get_running_loop().time() < deadline:
            status, what, pause = 0, None, RETRY_DELAY
            try:
                headers = self.session.headers({"last-event-id": self._last} if self._last else {})
                response = await (await Response.open(endpoint, "GET", headers)).head()
                status = response.status
                if obeys:
                    pause = float(response.headers.get("retry-after", pause))
            except Broken as error:
                what = repr(error)
            if status == 200:
                self._note("resumed", endpoint=endpoint.name)
                self._attach(response)
                return True
            self._note("refused", status=status, what=what, endpoint=endpoint.name)
            if status and status not in BUSY:
                return False
            await asyncio.sleep(pause)
        return False

    async def end(self, endpoint, limit=TIMEOUT):
        """Waits for the answer or an error. If the stream ends early, the client resumes."""
        deadline = asyncio.get_running_loop().time() + limit
        while not self._over.is_set():
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0 or not (await self._wait_on_stream(remaining) or await self._resume_again(endpoint, remaining)):
                self._note("gave up")
                break
        self.close()
        return self

    async def _wait_on_stream(self, limit):
        """Waits for the answer on the current stream. Returns whether the stream has delivered the answer, or still
        might."""
        if self._pump is None or self._pump.done():
            return False
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait([over, self._pump], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        return self._over.is_set() or not self._pump.done()

    async def _resume_again(self, endpoint, limit):
        """Resumes if the client has an event id, and returns whether it was accepted."""
        if self._last is None:
            return False
        await asyncio.sleep(0.05)
        return await self.resume(endpoint, limit)

    async def until_over(self, limit=TIMEOUT):
        """Waits for the answer or an error on the current stream, and returns whether there was one within `limit`."""
        await asyncio.wait([asyncio.ensure_future(self._over.wait())], timeout=limit)
        return self._over.is_set()

    async def until_cut_off(self, limit=TIMEOUT):
        """Returns when the stream has ended without the client ending it, or after `limit`."""
        await asyncio.wait([self._pump], timeout=limit)

    async def read_some(self, size):
        """Reads `size` bytes, so that the stream can then be cut in the middle of an event."""
        self._detach()
        try:
            await self._stream.some(size)
        except Broken as error:
            self._note("cut off", how=repr(error))

    def close(self):
        self._detach()
        if self._stream:
            self._stream.cut()

    @property
    def last(self):
        return self._last

    def _attach(self, response):
        self._stream = response
        self._pump = asyncio.create_task(self._read(response))

    def _detach(self):
        if self._pump:
            self._pump.cancel()
            self._pump = None

    async def _read(self, response):
        how = "end"
        try:
            async for event_id, data in response.events():
                self._last = event_id or self._last
                if data:
                    self._on_message(json.loads(data))
        except Broken as error:
            how = repr(error)
        if not self._over.is_set():
            self._note("cut off", how=how)

    def _on_message(self, message):
        params = message.get("params", {})
        if message.get("method") == "notifications/progress":
            self._progress.append(params["progress"])
            if params.get("message") != self.tag:
                self._note("crossed", of=params.get("message"))
            if len(self._progress) >= self._events:
                self._quiet.set()
        elif "method" in message:
            asked = params.get("message") or params["messages"][0]["content"]["text"]
            if asked != self.tag:
                self._note("crossed", of=asked)
            if not self.question.done():
                self.question.set_result(message)
        elif message.get("id") != self.id:
            self._note("crossed", of=message.get("id"))
        elif "error" in message:
            self._note("failed", code=message["error"]["code"], text=message["error"]["message"])
            self._over.set()
        else:
            text = message["result"]["content"][0]["text"]
            right = text in (self.tag.ljust(self._size, "."), f"word of {self.tag}")
            self._note("answered", right=right, progress=self._progress, text=text[:80])
            self._over.set()
        if self._over.is_set():
            self._quiet.set()

    def _message(self):
        return {"method": "tools/call", "id": self.id, "params": self._params}

    def _note_asked(self, endpoint):
        self._note("asked", session=self.session.id, id=str(self.id)[:80], endpoint=endpoint.name, events=self._events, **self._plan)

    def _note(self, event, **more):
        self.session.facts.note(event, tag=self.tag, **more)


def body_of(message):
    return json.dumps({"jsonrpc": "2.0", **message}).encode()

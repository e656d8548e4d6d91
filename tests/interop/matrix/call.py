"""A call that a client's program makes through its own proxy, and the actions on it."""

import asyncio

from .proxy import Proxy

# Tolerance for late cancels, and for all other delays of a busy machine.
TOLERANCE = 1.0
TIMEOUT = 30.0


class Call:
    def __init__(self, client, name):
        self.client = client
        self.name = name
        self.proxy = None
        self.server = None
        self.program = None
        # The client no longer exists and cannot receive an answer.
        self.has_disconnected = False
        self.notes = []
        self._told = {}
        self._waiting = []
        self._finished = False

    # === what it is told ===

    def on_event(self, event):
        """Receives an event of its server or of its client. Keeps the first event of each kind."""
        self._told.setdefault(event["event"], event)
        self._changed()

    def find_event(self, event):
        """Returns the first event of this kind, or `None` if there was none."""
        return self._told.get(event)

    # === what a scenario does ===

    async def streaming(self):
        """Returns when the handler works and the client has everything that it needs to resume. Also returns, with a
        note, if that does not happen in time or the call has an outcome before."""
        def begun():
            call = self.proxy.of_call()
            return self.find_event("started") and call and (call[0].event_ids or not self.client.sessions)

        await self.until(lambda: begun() or self.find_event("outcome"), TIMEOUT)
        if not begun():
            self.notes.append("the call never began")
        await asyncio.sleep(0.1)

    def cut(self, reset=False):
        self.proxy.cut(reset=reset)

    async def back(self, times=1):
        """Returns when the client has resumed this many times, when the handler has ended, or when the time is over."""
        def resumed():
            resumes = self.proxy.of_call()[1:]
            streaming = [resume for resume in resumes if resume.status == 200 and resume.event_ids]
            return len(streaming) >= times or self.over()

        await self.until(resumed, self.server.grace + TOLERANCE + 1.0)
        await asyncio.sleep(0.1)

    async def cancelled(self):
        """Returns when the handler has ended, or when the time for its cancel is over."""
        await self.until(self.over, self.server.grace + TOLERANCE + 0.5)

    def kill(self):
        """Kills the client's process."""
        self.has_disconnected = self.proxy.leaving = True
        self.program.kill()

    def refuse(self):
        """Cuts the client off, and refuses its connections for now."""
        self.proxy.refusing = True
        self.cut()

    def accept_again(self):
        self.proxy.refusing = False

    async def leave(self, how):
        """Has the client end its call properly: by a `cancel`, a `delete` of its session, or a `close` of itself."""
        self.has_disconnected = how != "cancel"
        self.proxy.leaving = True
        self.program.order(**{how: self.name})
        await self.until(lambda: not self.proxy.leaving, TIMEOUT, "it does not end")

    async def seen(self, events):
        """Returns when events with this many different ids were sent to the client, including the empty first one."""
        def passed():
            return len(set().union(*(stream.event_ids for stream in self.proxy.of_call()))) >= events

        await self.until(passed, TIMEOUT, f"the client did not see {events} events")
        await asyncio.sleep(0.1)

    def finish(self):
        """Releases the handler."""
        self._finished = True
        self.server.order(finish=self.name)

    def over(self):
        """Returns the event of the handler's end, or `None` if the handler works."""
        return self.find_event("finished") or self.find_event("cancelled")

    # === its life ===

    async def open(self, server, program, timeout, **arguments):
        """Has its client connect and call the tool with these arguments."""
        self.server = server
        self.program = program
        self.proxy = Proxy(server.port, self._changed)
        url = await self.proxy.start()
        program.order(open=self.name, url=url, arguments={"cell": self.name, **arguments}, timeout=timeout)

    async def close(self):
        """Has the client close, waits for that for 2 s at most, and stops the proxy."""
        self.program.order(close=self.name)
        await self.until(lambda: self.find_event("closed") or not self.program.runs, 2.0)
        self.proxy.stop()

    async def until(self, condition, seconds, complaint=None):
        """Waits for the condition, and records the complaint if it is not met in time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            try:
                await asyncio.wait_for(waiting, deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                if condition():
                    return
                if complaint:
                    self.notes.append(complaint)
                return

    def _changed(self):
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def log(self):
        """Returns the observed exchanges and events by time, for the analysis of a failure."""
        began = self.proxy.exchanges[0].at if self.proxy.exchanges else 0
        lines = [(exchange.at, f"{exchange}") for exchange in self.proxy.exchanges]
        for event in self._told.values():
            more = {key: str(value)[:160] for key, value in event.items() if key not in ("event", "at", "cell")}
            lines.append((event["at"], f"{event['event']} {more or ''}".strip()))
        if self.proxy.cut_at:
            lines.append((self.proxy.cut_at, "(last cut)"))
        return [f"{at - began:7.2f} s  {line}" for at, line in sorted(lines)]

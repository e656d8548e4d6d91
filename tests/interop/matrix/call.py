"""A call that a client's program makes through its own proxy, and what can be done to it."""

import asyncio

from .proxy import Proxy

# How late a cancel may be, and how much else a busy machine may delay things.
TOLERANCE = 1.0
TIMEOUT = 30.0


class Call:
    def __init__(self, client, name):
        self.client = client
        self.name = name
        self.proxy = None
        self.server = None
        self.program = None
        # The client no longer exists, so it cannot receive an answer.
        self.has_disconnected = False
        self.notes = []
        self._events = {}
        self._waiting = []
        self._finished = False

    # === what it is notified of ===

    def on_event(self, event):
        """Receives an event from its server or its client. Keeps the first event of each kind."""
        self._events.setdefault(event["event"], event)
        self._changed()

    def find_event(self, event):
        """Returns the first event of this kind, or `None` if there has been none."""
        return self._events.get(event)

    # === what a scenario does ===

    async def streaming(self):
        """Returns once the handler is working and the client has everything it needs to resume. Also returns, with a
        note, if that does not happen in time or the call has an outcome first."""
        def begun():
            call = self.proxy.of_call()
            return self.find_event("started") and call and (call[0].event_ids or not self.client.sessions)

        await self.until(lambda: begun() or self.find_event("outcome"), TIMEOUT)
        if not begun():
            self.notes.append("the call never started")
        await asyncio.sleep(0.1)

    def cut(self, reset=False):
        self.proxy.cut(reset=reset)

    async def back(self, times=1):
        """Returns once the client has resumed this many times, the handler has ended, or time is up."""
        def resumed():
            resumes = self.proxy.of_call()[1:]
            streaming = [resume for resume in resumes if resume.status == 200 and resume.event_ids]
            return len(streaming) >= times or self.over()

        await self.until(resumed, self.server.grace + TOLERANCE + 1.0)
        await asyncio.sleep(0.1)

    async def cancelled(self):
        """Returns once the handler has ended, or the time for cancelling it is up."""
        await self.until(self.over, self.server.grace + TOLERANCE + 0.5)

    def kill(self):
        """Kills the client's process."""
        self.has_disconnected = self.proxy.leaving = True
        self.program.kill()

    def refuse(self):
        """Cuts the client off, and refuses its connections for the time being."""
        self.proxy.refusing = True
        self.cut()

    def accept_again(self):
        self.proxy.refusing = False

    async def leave(self, how):
        """Has the client end its call properly: by a `cancel`, by a `delete` of its session, or by a `close` of
        itself."""
        self.has_disconnected = how != "cancel"
        self.proxy.leaving = True
        self.program.order(**{how: self.name})
        await self.until(lambda: not self.proxy.leaving, TIMEOUT, "the client did not finish")

    async def seen(self, events):
        """Returns once the client has been sent events with this many different ids, including the empty first one."""
        def passed():
            return len(set().union(*(stream.event_ids for stream in self.proxy.of_call()))) >= events

        await self.until(passed, TIMEOUT, f"the client did not see {events} events")
        await asyncio.sleep(0.1)

    def finish(self):
        """Releases the handler."""
        self._finished = True
        self.server.order(finish=self.name)

    def over(self):
        """Returns the event with which the handler ended, or `None` if it is still working."""
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
        """Has its client close, waits up to 2 s for that, and stops the proxy."""
        self.program.order(close=self.name)
        await self.until(lambda: self.find_event("closed") or not self.program.runs, 2.0)
        self.proxy.stop()

    async def until(self, condition, seconds, complaint=None):
        """Waits for the condition, and notes the complaint if it is not met in time."""
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
        """Returns the observed exchanges and events in order of time, to analyse a failure."""
        began = self.proxy.exchanges[0].at if self.proxy.exchanges else 0
        lines = [(exchange.at, f"{exchange}") for exchange in self.proxy.exchanges]
        for event in self._events.values():
            more = {key: str(value)[:160] for key, value in event.items() if key not in ("event", "at", "cell")}
            lines.append((event["at"], f"{event['event']} {more or ''}".strip()))
        if self.proxy.cut_at:
            lines.append((self.proxy.cut_at, "(last cut)"))
        return [f"{at - began:7.2f} s  {line}" for at, line in sorted(lines)]

"""One cell of the matrix: a client, its proxy, a call on a server, and what became of it."""

import asyncio
import sys
import time
from dataclasses import dataclass, field

from .proxy import Proxy

# How late a cancel may be, and everything else that a busy machine delays.
TOLERANCE = 1.0
# How long a client is watched after its call has ended: longer than any retry it was told.
WATCHED = 4.0
PATIENCE = 30.0
# Between the beginnings of two cells: not all of them at once.
PACE = 0.06


@dataclass
class Report:
    """What is to be judged and printed. Times are in seconds."""

    # "result", "cancelled", "lost" (the handler finished for a client that was there) or "ran on".
    what: str
    # From the last cut (or the beginning) to the result or the cancel.
    after: float
    error: str | None
    reason: str | None
    # That reached the server, and that did not.
    requests: int
    refused: int
    # Of these, how often it asked for the rest of a call that had ended for it.
    polls: int
    # Anything that went differently from what the scenario says.
    notes: list = field(default_factory=list)


class Cell:
    def __init__(self, client, scenario, tier, more=""):
        """`more` tells it from others like it."""
        self.client = client
        self.scenario = scenario
        self.tier = tier
        self.name = "/".join(filter(None, (client.key, scenario.key, tier, more)))
        self.proxy = None
        self.server = None
        self.program = None
        self.notes = []
        self._told = {}
        self._progress = 0
        self._waiting = []
        self._finished = False
        # There is no client any more that could get an answer.
        self._gone = False

    # === what it is told ===

    def heard(self, event):
        """Of its server or of its client."""
        self._told.setdefault(event["event"], event)
        self._progress += event["event"] == "progressed"
        self._changed()

    def told(self, event):
        return self._told.get(event)

    # === what a scenario does ===

    async def streaming(self):
        """The handler works, and the client has all it needs to come back."""
        def begun():
            call = self.proxy.of_call()
            return self.told("started") and call and (call[0].event_ids or not self.client.sessions)

        await self.until(begun, PATIENCE, "the call never began")
        await asyncio.sleep(0.1)

    def cut(self, reset=False):
        self.proxy.cut(reset=reset)

    async def back(self, times=1):
        """The client has come back that often, or it will not any more."""
        def resumed():
            resumes = self.proxy.of_call()[1:]
            streaming = [resume for resume in resumes if resume.status == 200 and resume.event_ids]
            return len(streaming) >= times or self.over()

        await self.until(resumed, self.server.grace + TOLERANCE + 1.0)
        await asyncio.sleep(0.1)

    async def cancelled(self):
        """The handler was cancelled, or its time for that is over."""
        await self.until(self.over, self.server.grace + TOLERANCE + 0.5)

    def kill(self):
        """The client's process is ended the hard way."""
        self._gone = self.proxy.leaving = True
        self.program.kill()

    def refuse(self):
        """The client is cut off, and not let back for now."""
        self.proxy.refusing = True
        self.cut()

    def let_back(self):
        self.proxy.refusing = False

    async def leave(self, how):
        """The client ends its call as it should: by a `cancel`, a `delete` of its session, or a `close` of itself."""
        self._gone = how != "cancel"
        self.proxy.leaving = True
        self.program.order(**{how: self.name})
        await self.until(lambda: not self.proxy.leaving, PATIENCE, "it does not end")

    async def progress(self):
        """The handler says how far it is."""
        steps = self._progress + 1
        self.server.order(progress=self.name)
        await self.until(lambda: self._progress == steps, PATIENCE, "no progress")

    async def seen(self, events):
        """So many different events have gone to the client, with the first, which is empty."""
        def passed():
            return len(set().union(*(stream.event_ids for stream in self.proxy.of_call()))) >= events

        await self.until(passed, PATIENCE, f"the client did not see {events} events")
        await asyncio.sleep(0.1)

    def finish(self):
        """Lets the handler finish."""
        self._finished = True
        self.server.order(finish=self.name)

    def over(self):
        return self.told("finished") or self.told("cancelled")

    # === its life ===

    async def run(self, server, program):
        self.server = server
        self.program = program
        self.proxy = Proxy(server.port, self._changed)
        url = await self.proxy.start()
        begun = time.time()
        size = self.scenario.answer
        self.program.order(open=self.name, url=url, bytes=size, timeout=self.scenario.timeout)
        try:
            await self.scenario.play(self)
            ran_on = not self._finished and not self.over()
            if ran_on:
                self.finish()
            gone = self._gone or self.proxy.refusing
            await self.until(lambda: self.over() and (gone or self.told("outcome")), PATIENCE, "no end")
            ended_at = time.time()
            # A client that the scenario took away is not there to poll.
            await asyncio.sleep(0 if gone else WATCHED)
            return self._report(begun, ended_at, ran_on)
        finally:
            self.program.order(close=self.name)
            await self.until(lambda: self.told("closed") or not self.program.runs, 2.0)
            self.proxy.stop()

    def _report(self, begun, ended_at, ran_on):
        outcome = self.told("outcome") or {}
        cut_at = self.proxy.cut_at or begun
        cancelled = self.told("cancelled")
        result = outcome.get("text")
        if result is not None:
            what, after = "result", outcome["at"] - cut_at
            if result != self.name.ljust(self.scenario.answer, "."):
                self.notes.append(f"a wrong result of {len(result)} bytes: {result[:80]}")
            if cancelled:
                self.notes.append("cancelled, and yet there is a result")
            # Some clients handle several notifications at once.
            if sorted(outcome["progress"]) != self.scenario.progress:
                self.notes.append(f"the client saw the progress {outcome['progress']}")
        elif cancelled:
            what, after = "cancelled", cancelled["at"] - cut_at
        elif ran_on:
            what, after = "ran on", ended_at - cut_at
        else:
            what, after = "lost", outcome.get("at", ended_at) - cut_at
        polls = [exchange for exchange in self.proxy.of_call()[1:] if exchange.at > ended_at]
        return Report(
            what,
            after,
            outcome.get("error"),
            cancelled and cancelled["reason"],
            len(self.proxy.exchanges),
            self.proxy.refused,
            len(polls),
            self.notes,
        )

    async def until(self, condition, seconds, complaint=None):
        """Waits for it, and notes the complaint if it does not come true in time."""
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
        """What it saw, for those who look for the reason of a failure."""
        began = self.proxy.exchanges[0].at if self.proxy.exchanges else 0
        lines = [(exchange.at, f"{exchange}") for exchange in self.proxy.exchanges]
        for event in self._told.values():
            more = {key: str(value)[:160] for key, value in event.items() if key not in ("event", "at", "cell")}
            lines.append((event["at"], f"{event['event']} {more or ''}".strip()))
        if self.proxy.cut_at:
            lines.append((self.proxy.cut_at, "(last cut)"))
        return [f"{at - began:7.2f} s  {line}" for at, line in sorted(lines)]


async def paced(run, cells):
    """Runs all cells, the longest first."""
    reports = {}

    async def one(cell, begin):
        await asyncio.sleep(begin)
        try:
            reports[cell] = await run(cell)
        except Exception as error:
            reports[cell] = None
            print(f"{cell.name} broke: {error!r}", file=sys.stderr)

    ordered = sorted(cells, key=lambda cell: -cell.scenario.timeout)
    await asyncio.gather(*(one(cell, PACE * turn) for turn, cell in enumerate(ordered)))
    return reports

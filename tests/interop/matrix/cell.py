"""One cell of the matrix: a client, its proxy, a call to a server, and the result."""

import asyncio
import sys
import time
from dataclasses import dataclass, field

from .call import TIMEOUT, Call

# How long a client is observed after its call has ended. Longer than any reconnect delay.
WATCHED = 4.0
# How long to wait between starting two cells.
PACE = 0.06
# How many cells may be on their way to their call. On a slow machine later cells wait, so that running ones stay in time.
OPENING = 16


@dataclass
class Report:
    """The result, to be judged and printed. Times are in seconds."""

    # "result", "cancelled", "lost" (the handler finished while its client was connected) or "ran on".
    what: str
    # From the last cut (or the start) to the result or the cancel, or else to the client's error or the end.
    after: float
    # The error that the client got.
    error: str | None
    # Why the handler's token fired, if it did and has a reason.
    reason: str | None
    # How many requests reached the server, and how many connections the proxy refused.
    requests: int
    refused: int
    # How many of these requests resumed the call after it had ended for the client.
    polls: int
    # Deviations from the scenario.
    notes: list = field(default_factory=list)


class Cell(Call):
    def __init__(self, client, scenario, tier, more=""):
        """`more` distinguishes the cell from similar ones."""
        super().__init__(client, "/".join(filter(None, (client.key, scenario.key, tier, more))))
        self.scenario = scenario
        self.tier = tier
        self._progress = 0

    def on_event(self, event):
        self._progress += event["event"] == "progressed"
        super().on_event(event)

    async def progress(self):
        """Has the handler report progress."""
        steps = self._progress + 1
        self.server.order(progress=self.name)
        await self.until(lambda: self._progress == steps, TIMEOUT, "no progress")

    async def run(self, server, program):
        """Plays the scenario on this server and returns the report."""
        begun = time.time()
        await self.open(server, program, self.scenario.timeout, bytes=self.scenario.answer)
        try:
            await self.scenario.play(self)
            ran_on = not self._finished and not self.over()
            if ran_on:
                self.finish()
            has_disconnected = self.has_disconnected or self.proxy.refusing
            await self.until(lambda: self.over() and (has_disconnected or self.find_event("outcome")), TIMEOUT, "the cell did not end")
            ended_at = time.time()
            # A client that the scenario has removed cannot poll.
            await asyncio.sleep(0 if has_disconnected else WATCHED)
            return self._report(begun, ended_at, ran_on)
        finally:
            await self.close()

    def _report(self, begun, ended_at, ran_on):
        outcome = self.find_event("outcome") or {}
        cut_at = self.proxy.cut_at or begun
        cancelled = self.find_event("cancelled")
        result = outcome.get("text")
        if result is not None:
            what, after = "result", outcome["at"] - cut_at
            if result != self.name.ljust(self.scenario.answer, "."):
                self.notes.append(f"a wrong result of {len(result)} bytes: {result[:80]}")
            if cancelled:
                self.notes.append("cancelled, but there is a result anyway")
            # Some clients handle several notifications concurrently.
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


async def paced(run, cells):
    """Runs all cells, the longest first, and returns their reports. A cell that raises has the report `None`."""
    reports = {}
    opening = asyncio.Semaphore(OPENING)

    async def one(cell):
        try:
            reports[cell] = await run(cell)
        except Exception as error:
            reports[cell] = None
            print(f"{cell.name} broke: {error!r}", file=sys.stderr)

    async def until_started(cell, task):
        started = asyncio.create_task(cell.until(lambda: cell.find_event("started"), TIMEOUT))
        await asyncio.wait((started, task), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        opening.release()
        await task

    begun = []
    for cell in sorted(cells, key=lambda cell: -cell.scenario.timeout):
        await opening.acquire()
        begun.append(asyncio.create_task(until_started(cell, asyncio.create_task(one(cell)))))
        await asyncio.sleep(PACE)
    await asyncio.gather(*begun)
    return reports

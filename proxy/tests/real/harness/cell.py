"""One cell of the table: a client in a story, and its call on one server."""

import asyncio

from .relay import Relay

TIMEOUT = 60.0
ANSWER = 2000
CLIENT_TIMEOUT = 120


class Cell:
    def __init__(self, tier, upstream, client, scenario, grace, world):
        self.tier = tier
        self.upstream = upstream
        self.client = client
        self.scenario = scenario
        self.grace = grace
        self.name = f"{tier}/{upstream.key}/{client.key}/{scenario.key}/{scenario.seconds}"
        self._world = world
        self._relay = None

    async def run(self, serving, program):
        self._relay = Relay(serving.port, self._world.changed)
        self._note("plan", tier=self.tier, upstream=self.upstream.key, client=self.client.key,
                   scenario=self.scenario.key, grace=self.grace, sync=self.upstream.sync, resumable=self.resumable,
                   expected=self.name.ljust(ANSWER, "."), log=str(serving.log))
        arguments = {"cell": self.name, "bytes": ANSWER}
        program.order(open=self.name, url=await self._relay.start(), arguments=arguments, timeout=CLIENT_TIMEOUT)
        try:
            await self.scenario.play(self)
        finally:
            self._note("end")
            self._world.begun(self)
            program.order(close=self.name)
            # A client that has been asked to close may send further requests.
            self._relay.refusing = True
            self._relay.accept_again()
            self._relay.stop()

    @property
    def resumable(self):
        """Returns whether the call belongs to a session in which the client can resume."""
        return self.upstream.sessions and self.client.sessions

    # === what a scenario does ===

    async def streaming(self):
        """Waits until the tool is working and the client has everything that it needs to resume. Otherwise the cell is
        broken."""

        def ready():
            call = self._relay.of_call()
            # Without the proxy most servers send no event ids.
            needs_id = self.resumable and self.tier == "proxy"
            return self._world.find_event(self.name, "started") and call and (call[0].event_ids or not needs_id)

        if not await self._world.until(lambda: ready() or self._world.find_event(self.name, "outcome"), TIMEOUT) or not ready():
            self._note("broken", what="the call never started, or its client has nothing to resume from")
        await self.sleep(0.2)
        self._world.begun(self)

    async def quiet(self):
        await self._world.all_begun()

    def cut(self):
        self._relay.hold()
        self._relay.cut()
        self._note("cut")

    def back(self):
        self._note("back")
        self._relay.accept_again()

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    async def until(self, event, seconds):
        await self._world.until(lambda: self._world.find_event(self.name, event), seconds)

    def _note(self, event, **more):
        self._world.facts.note(event, cell=self.name, **more)


class World:
    """What all cells share: the recorded events, and the order of their cuts."""

    # How often the servers' files are read.
    POLL_INTERVAL = 0.05
    # A pause between two cuts, so that they do not coincide.
    PACE = 0.05

    def __init__(self, facts, tail):
        self.facts = facts
        self._tail = tail
        self._events = {}
        self._waiting = set()
        self._to_begin = set()
        self._all_begun = asyncio.Event()
        self._turn = 0

    def cells(self, cells):
        self._to_begin = {cell.name for cell in cells}

    def begun(self, cell):
        self._to_begin.discard(cell.name)
        if not self._to_begin:
            self._all_begun.set()

    async def all_begun(self):
        await self._all_begun.wait()
        self._turn += 1
        await asyncio.sleep(1.0 + self.PACE * self._turn)

    def find_event(self, cell, event):
        return event in self._events.get(cell, ())

    async def until(self, condition, seconds):
        """Waits for the condition. Returns `False` if it is not met in time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            await asyncio.wait([waiting], timeout=left)
            self._waiting.discard(waiting)
        return True

    def changed(self):
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def read_facts(self):
        """Reads new facts until cancelled."""
        while True:
            news = False
            for fact in self._tail.new():
                if "cell" in fact:
                    self._events.setdefault(fact["cell"], set()).add(fact["event"])
                    news = True
            if news:
                self.changed()
            await asyncio.sleep(self.POLL_INTERVAL)

"""Real SDKs as clients: the programs in tests/interop. Each call has its own proxy to the balancer, which can cut
connections. Facts are recorded as for the other clients."""

import os
from pathlib import Path
from typing import NamedTuple

from matrix.call import Call
from matrix.ends import ClientProgram
from matrix.install import install_sdks

from .world import GRACE

SDKS = ["ts1", "ts2", "py1"]
# After how many seconds a client abandons its call.
TIMEOUT = 10.0
# How many seconds a call's last event may take.
EVENT_TIMEOUT = 10.0


async def sdks(world):
    cache = Path(os.environ.get("INTEROP_CACHE") or world.work / "cache").resolve()
    return await install_sdks(cache, SDKS)


class Front(NamedTuple):
    """The instances as a call sees them."""

    port: int
    grace: float = GRACE


class SdkCall(Call):
    count = 0

    def __init__(self, world, client, story, variant):
        SdkCall.count += 1
        super().__init__(client, f"sdk/{client.key}/{variant}/{SdkCall.count}")
        self._world = world
        self._story = story
        self._size = 0
        self._is_recorded = False
        world.facts.follow(self.name, self._on_fact)

    async def begin(self, program, cuts=0, events=3, size=60, **more):
        """Has the client open a session and call the tool. It will be cut off `cuts` times."""
        self._size = size
        self._note("asked", session=None, id=None, endpoint="front", events=events, scenario="sdk", story=self._story,
                   sdk=self.client.key, cuts=cuts)
        await self.open(Front(self._world.front.port), program, TIMEOUT, tag=self.name, bytes=size, events=events, **more)

    async def answered(self):
        """Returns when the client has the answer or an error, or after the timeout."""
        await self.until(lambda: self.find_event("outcome"), TIMEOUT + 1.0, "no outcome")
        if "text" in (self.find_event("outcome") or {}):
            # The client's event may arrive before the instance's.
            await self.until(self.over, EVENT_TIMEOUT)

    async def close(self):
        if self.program.runs:
            await super().close()
        self.proxy.stop()
        self._record_exchanges()
        for what in self.notes:
            self._note("missed", how=what)

    # === what is done to the client, and the results, as facts ===

    def cut(self, reset=False):
        self._note("cut", reset=reset)
        super().cut(reset)

    def kill(self):
        self._note("cut", how="killed")
        super().kill()

    async def leave(self, how):
        """Returns when the end has been answered, because a client that is closed right away aborts its last request.
        Does nothing if the call has not started."""
        if not self.find_event("started"):
            return
        what = "deleted" if self.over() else "sent"
        self.has_disconnected = how == "delete"
        if self.has_disconnected:
            # After the DELETE, exchanges may be answered with 404.
            self._record_exchanges()
        self.program.order(**{how: self.name})
        await self.until(lambda: self._exchange_of(how) or self.find_event("closed"), EVENT_TIMEOUT)
        if exchange := self._exchange_of(how):
            self._note(what, at=exchange.at, what=how)

    def finish(self):
        self._finished = True
        if started := self.find_event("started"):
            self._world.node(started["instance"]).release(self.name)

    def on_event(self, event):
        super().on_event(event)
        if event["event"] != "outcome":
            return
        if "text" in event:
            right = event["text"] == self.name.ljust(self._size, ".")
            self._note("answered", right=right, progress=event["progress"], text=event["text"][:80])
        else:
            self._note("failed", code=None, text=event["error"])

    def _on_fact(self, fact):
        """Forwards a fact from an instance as one of the call's events."""
        ends = {"completed": "finished", "cancelled": "cancelled", "dropped": "cancelled"}
        self.on_event({**fact, "event": ends.get(fact.get("how"), fact["event"])})

    def _exchange_of(self, how):
        is_end = {
            "cancel": lambda exchange: exchange.rpc == "notifications/cancelled",
            "delete": lambda exchange: exchange.method == "DELETE",
        }[how]
        return next((exchange for exchange in self.proxy.exchanges if is_end(exchange) and exchange.status), None)

    def _record_exchanges(self):
        """Records the exchanges of the call's proxy, once."""
        if self._is_recorded:
            return
        self._is_recorded = True
        resumes = self.proxy.of_call()[1:]
        for exchange in self.proxy.exchanges:
            if (exchange.status or 0) >= 400:
                self._note("refused", at=exchange.at, status=exchange.status)
            if exchange in resumes:
                self._note("resumed" if exchange.event_ids else "resuming", at=exchange.at)

    def _note(self, event, **more):
        self._world.facts.note(event, tag=self.name, **more)


def program(world, client, calls, name):
    """Returns the client's process for these calls."""
    return ClientProgram(client, calls, world.work / f"{name}.log", {})

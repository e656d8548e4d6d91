"""Redis is killed and restarts empty, is stopped, or does not answer for a while."""

import asyncio
import signal

from ..world import GRACE

OUTAGES = [("kill", 1), ("kill", 5), ("kill", 60), ("stop", 5), ("pause", 5)]
SHORT = [("kill", 4), ("stop", 4)]
# For each instance as the owner.
GROUPS = 2
CALLS = 7
# How much longer than its grace an orphan may take after the directory has recovered, with a margin.
LATE = 5.0


async def play(world, short):
    outages = SHORT if short else OUTAGES
    groups = len(world.nodes) * (1 if short else GROUPS)
    world.facts.note("plan", scenario="directory", calls=len(outages) * groups * CALLS)
    for how, seconds in outages:
        await _outage(world, how, seconds, groups)


async def _outage(world, how, seconds, groups):
    failed, recovered, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    groups = [Group(world, number) for number in range(groups)]
    await asyncio.gather(*(group.begin() for group in groups))
    playing = asyncio.gather(*(group.play(failed, recovered, over) for group in groups))
    # Less than a grace.
    await asyncio.sleep(GRACE / 4)
    await _begin_outage(world, how, seconds)
    world.facts.note("outage", what="redis", how=how)
    failed.set()
    await asyncio.sleep(seconds)
    await _end_outage(world, how)
    world.facts.note("recovered", what="redis")
    recovered.set()
    await asyncio.sleep(GRACE + LATE)
    over.set()
    await playing
    await world.settle()


async def _begin_outage(world, how, seconds):
    if how == "pause":
        await world.redis.ask(f"CLIENT PAUSE {seconds * 1000} ALL")
    elif how == "stop":
        world.redis.signal(signal.SIGSTOP)
    else:
        await world.redis.kill()


async def _end_outage(world, how):
    if how == "stop":
        world.redis.signal(signal.SIGCONT)
    elif how == "kill":
        await world.redis.start()
    await world.redis.ready()


class Group:
    """Clients of an instance, of a second one that relays to it, and of a third that does not know the session."""

    def __init__(self, world, number):
        self._world = world
        self._reset = number % 2 == 0
        self._owner, self._other, self._third = (node.endpoint for node in world.turn(number))

    async def begin(self):
        """Starts all calls while the directory is working."""
        self._by_owner = await self._call("stay", self._owner)
        self._by_relay = await self._call("stay", self._other)
        self._resuming = await self._call("resumes", self._owner)
        self._leaving = [await self._call("abandoned", endpoint) for endpoint in (self._owner, self._other)]
        self._left = await self._call("abandoned", self._other)

    async def play(self, failed, recovered, over):
        poking = asyncio.create_task(self._poke(over))
        # The directory fails before the grace ends.
        self._left.cut()
        await failed.wait()
        await asyncio.sleep(0.3)
        await self._world.release(self._by_owner)
        for call in [self._resuming, *self._leaving]:
            call.cut(self._reset)
        resumes = asyncio.create_task(self._resuming.resume(self._third, 90.0))
        # Starts without the directory.
        opened = await self._call("resumes", self._owner)
        await self._by_owner.until_over()
        await recovered.wait()
        await self._world.release(self._by_relay)
        await self._by_relay.until_over()
        await resumes
        await self._end(self._resuming)
        opened.cut()
        await opened.resume(self._third)
        await self._end(opened)
        await over.wait()
        await poking
        await self._world.ended([*self._leaving, self._left])
        for call in (self._by_owner, self._by_relay):
            call.close()
            endpoints = [node.endpoint for node in self._world.nodes]
            await asyncio.gather(*(call.session.whose(endpoint, f"after {call.tag}") for endpoint in endpoints))

    async def _call(self, story, through):
        return await self._world.call("directory", story, self._owner, through=through)

    async def _end(self, call):
        await self._world.release(call)
        await call.end(self._third)

    async def _poke(self, over):
        """Keeps probing live sessions."""
        while not over.is_set():
            for call in (self._by_owner, self._by_relay, self._resuming):
                await call.session.poke(self._world.front, limit=5.0)
            await asyncio.sleep(0.15)

"""Two members at one advertised address, as when a newer process is replacing a server. The other instances'
connections to that address may reach the first member or the newcomer. The newcomer answers 421, because it does not
have the session, but this must not take a session away from the first member while that is alive. Then the first member
leaves, and other instances serve its sessions."""

import asyncio

from ..referee import HEARTBEAT_INTERVAL, LEASE
from ..tcp_proxy import TcpProxy

GROUPS = 10
SHORT = 2
CALLS = 6
# How long all connections reach the newcomer. This is longer than it would take to cancel a call without its client if
# no instance refused clients. No instance cancels a call during the first lease after its start, and the first member
# has only just started.
AFTER_LEASE = LEASE + HEARTBEAT_INTERVAL + 0.5
# How long after its instance has started to leave a call ends.
LATER = 0.5


async def play(world, short):
    groups = SHORT if short else GROUPS
    world.facts.note("plan", scenario="address", calls=groups * CALLS)
    first = world.nodes[0]
    async with TcpProxy(first.peers_at) as proxy:
        advertised = "--advertise", f"{proxy.host}:{proxy.port}"
        await first.leave()
        await first.restart(*advertised)
        newcomer = await world.join("d", *advertised)
        try:
            await world.settle()
            await _meet(world, proxy, first, newcomer, groups)
        finally:
            await world.part(newcomer)
            await first.leave()
            await first.restart()
            await world.settle()


async def _meet(world, proxy, first, newcomer, number):
    groups = [Group(world, first) for _ in range(number)]
    # Connections reach the two members alternately.
    proxy.targets = first.peers_at, newcomer.peers_at
    await asyncio.gather(*(group.begin() for group in groups))
    proxy.targets = (newcomer.peers_at,)
    over = asyncio.Event()
    resumes = [asyncio.create_task(group.resume(over)) for group in groups]
    await asyncio.sleep(AFTER_LEASE)
    over.set()
    proxy.targets = (first.peers_at,)
    await asyncio.gather(*resumes)
    await asyncio.gather(*(group.begin_last() for group in groups))
    proxy.targets = (newcomer.peers_at,)
    for group in groups:
        group.cut_last()
    leaving = asyncio.create_task(first.leave())
    await asyncio.gather(*(group.end(leaving) for group in groups))


class Group:
    """Clients of the first member, and of instances that relay to it."""

    def __init__(self, world, first):
        self._world = world
        self._first = first
        self._first_endpoint, self._other, self._third = (node.endpoint for node in world.nodes[:3])

    async def begin(self):
        self._direct = await self._call("stay", self._first_endpoint)
        self._relayed = await self._call("stay", self._other)
        self._resuming = await self._call("resumes", self._first_endpoint)
        self._kept = await self._call("resumes", self._third)
        self._sessions = [call.session for call in (self._direct, self._relayed, self._resuming, self._kept)]
        self._own(self._sessions)

    async def resume(self, over):
        """Until `over`, all connections from the other instances reach the newcomer."""
        for call in (self._resuming, self._kept):
            call.cut()
        resumes = [asyncio.create_task(self._resuming.resume(self._other, obeys=True))]
        await self._world.release_until_ended(self._kept)
        resumes.append(asyncio.create_task(self._kept.resume(self._third, obeys=True)))
        # Neither a client of the first member nor one that was already connected is affected.
        await self._world.release(self._direct)
        await self._direct.until_over()
        await self._world.release(self._relayed)
        await self._relayed.until_over()
        while not over.is_set():
            for session in self._sessions:
                await self._check_session(session, over)
            await asyncio.sleep(0.5)
        await asyncio.gather(*resumes)
        await self._world.release(self._resuming)
        await asyncio.gather(self._resuming.end(self._other), self._kept.end(self._third))

    async def begin_last(self):
        """Begins calls that end while the first member is leaving."""
        self._attached = await self._call("stay", self._other)
        self._last = await self._call("resumes", self._other)
        self._own([self._attached.session, self._last.session])

    def cut_last(self):
        self._last.cut()

    async def end(self, leaving):
        resumes = asyncio.create_task(self._last.resume(self._third, obeys=True))
        await asyncio.sleep(LATER)
        await self._world.release(self._attached)
        await self._attached.until_over()
        await self._world.release(self._last)
        await leaving
        await resumes
        await self._last.end(self._third)
        for call in (self._direct, self._relayed, self._attached):
            call.close()
        endpoints = [node.endpoint for node in self._world.nodes if node is not self._first]
        for session in [*self._sessions, self._attached.session, self._last.session]:
            await asyncio.gather(*(session.whose(endpoint, f"after {session.id}") for endpoint in endpoints))

    async def _check_session(self, session, over):
        """Checks that an instance that cannot reach the owner asks the client to retry."""
        for endpoint in (self._other, self._third):
            status = await session.poke(endpoint)
            if not over.is_set():
                self._check("turned away", status == 503, status=status)
        name = await session.whose(self._first_endpoint, f"owner of {session.id}")
        self._check("served by the first", name == self._first.name, name=name)

    async def _call(self, story, through):
        return await self._world.call("address", story, self._first_endpoint, through=through)

    def _own(self, sessions):
        self._world.facts.note("owns", instance=self._first.name, sessions=[session.id for session in sessions])

    def _check(self, what, right, **more):
        self._world.facts.note("check", scenario="address", what=what, right=right, **more)

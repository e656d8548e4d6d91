"""Silent networks: between an instance and Redis, between two instances, and between all instances and Redis."""

import asyncio

from ..world import GRACE

SECONDS = 30
SHORT = 8
# How much longer than its grace an orphan may take after the network has recovered, with a margin.
LATE = 6.0
GROUPS = 2
CALLS = 6
# The silenced links, and whether they cut the first instance off from the directory.
OUTAGES = [([("a", "redis")], True), ([("a", "b")], False), ([("a", "redis"), ("b", "redis"), ("c", "redis")], True)]


async def play(world, short):
    world.facts.note("plan", scenario="networks", calls=len(OUTAGES) * GROUPS * CALLS)
    for links, is_directory_cut in OUTAGES:
        await _outage(world, links, is_directory_cut, SHORT if short else SECONDS)


async def _outage(world, links, is_directory_cut, seconds):
    over = asyncio.Event()
    a, b, c = (node.endpoint for node in world.nodes)
    groups = [await _begin(world) for _ in range(GROUPS)]
    sessions = [call.session for calls in groups for call in calls]
    for name, other in links:
        world.network.silence(name, other)
    if is_directory_cut:
        world.facts.note("outage", what="redis", how="silent", links=links)
    poking = asyncio.create_task(_poke(sessions, [a, b, c], over))
    await asyncio.sleep(0.3)
    for direct, _relayed, resumed, _late, abandoned, abandoned_relayed in groups:
        await world.release(direct)
        for call in (resumed, abandoned):
            call.cut()
        abandoned_relayed.cut()
    # Through any instance that accepts the client. The call's own instance might not be able to.
    resumes = [asyncio.create_task(_resume(world, calls[2])) for calls in groups]
    await asyncio.sleep(seconds)
    for name, other in links:
        world.network.restore(name, other)
    if is_directory_cut:
        await world.redis.ready()
        world.facts.note("recovered", what="redis")
    for calls in groups:
        for call in (calls[1], calls[3]):
            await world.release(call)
    await asyncio.sleep(GRACE + LATE)
    over.set()
    await asyncio.gather(*resumes, poking)
    await asyncio.gather(*(call.end(c) for calls in groups for call in calls[:4]))
    await world.ended([call for calls in groups for call in calls[4:]])
    await world.settle()
    for session in sessions:
        group = f"after {links} {session.id}"
        await asyncio.gather(*(session.whose(endpoint, group) for endpoint in (a, b, c)))


async def _begin(world):
    """Begins calls in sessions on the first instance, with clients that stay connected, that resume, and that
    disconnect for good."""
    a, b, c = (node.endpoint for node in world.nodes)
    return [
        await world.call("networks", "stay", a),
        await world.call("networks", "resumes", a, through=c),
        await world.call("networks", "resumes", a),
        await world.call("networks", "resumes", a, through=a),
        await world.call("networks", "abandoned", a),
        await world.call("networks", "abandoned", a, through=c),
    ]


async def _resume(world, call):
    await asyncio.sleep(GRACE / 4)
    await call.resume(world.front, 60.0)
    await world.release(call)


async def _poke(sessions, endpoints, over):
    while not over.is_set():
        tries = [session.poke(endpoint, limit=3.0) for session in sessions[::3] for endpoint in endpoints]
        await asyncio.gather(*tries)
        await asyncio.sleep(0.2)

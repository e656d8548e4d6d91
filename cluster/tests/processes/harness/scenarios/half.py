"""Clients that send half of a request and stay connected: to the session's owner, to another instance, and to one that
would have to restore the session for it. In the meantime the session's other requests are served, and no call starts
from half a request."""

import asyncio

from ..client import Call
from ..referee import BODY_IDLE, BODY_IDLE_DETECTION

SESSIONS = 6
SHORT = 2
# A body of the first size is read in full before it is relayed. One of the second size is read as the owner asks for
# it.
SIZES = [100, 100_000]
# How long the session's other requests may take next to half requests.
WITHIN = 3.0
# How long a half request has been waiting before other requests are sent.
BEFORE = 0.3
# The half requests at the owner's own listener, which are limited only by their client.
DIRECT = len(SIZES)


async def play(world, short):
    sessions = SHORT if short else SESSIONS
    # Half requests at three instances, then at two, and as many whole ones.
    world.facts.note("plan", scenario="half", calls=sessions * (3 + 2) * (len(SIZES) + 1))
    owner, other, third = world.nodes
    opened = [await world.session(owner.endpoint) for _ in range(sessions)]
    await asyncio.gather(*(_halves(world, session, [owner, other, third], short, DIRECT) for session in opened))
    # The owner leaves, so that the session's first request at another instance is half a request.
    await owner.leave()
    try:
        await asyncio.gather(*(_halves(world, session, [other, third], short, 0) for session in opened))
    finally:
        await owner.restart()
    for session in opened:
        await asyncio.gather(*(session.whose(node.endpoint, f"after {session.id}") for node in world.nodes))


async def _halves(world, session, nodes, short, direct):
    """Sends these instances half requests of each size, and each of them a whole one as well."""
    halves = [Call(session, "half", "half", filler="." * size) for _ in nodes for size in SIZES]
    endpoints = [node.endpoint for node in nodes for _ in SIZES]
    limit = BODY_IDLE + 2 * BODY_IDLE_DETECTION
    waiting = [asyncio.create_task(half.ask_half(endpoint, limit)) for half, endpoint in zip(halves, endpoints)]
    await asyncio.sleep(BEFORE)
    for node in nodes:
        await _whole(world, session, node.endpoint)
    if not short:
        await asyncio.wait(waiting[direct:])
    for half, task in zip(halves, waiting):
        if not task.done():
            half.cut()
    await asyncio.gather(*waiting)


async def _whole(world, session, endpoint):
    """Makes a whole call and checks that it is answered in time."""
    call = Call(session, "half", "stay")
    begun = asyncio.get_running_loop().time()
    try:
        await asyncio.wait_for(call.ask(endpoint), WITHIN)
        await world.release(call)
        await call.until_over()
    except asyncio.TimeoutError:
        pass
    seconds = asyncio.get_running_loop().time() - begun
    world.facts.note("check", scenario="half", kind="not served beside half a body", right=seconds < WITHIN, seconds=seconds,
                     endpoint=endpoint.name)
    call.close()

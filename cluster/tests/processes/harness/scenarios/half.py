"""Clients that send half of a request and stay connected: to the owner of the session, to another instance, and to one that would
restore the session for it. Other requests of the session are served meanwhile, and nothing begins of the half."""

import asyncio

from ..client import Call
from ..referee import BODY_IDLE, BODY_IDLE_SEEN

SESSIONS = 6
SHORT = 2
# Of a body of the first size all is read before it is relayed; one of the second size is read when the owner asks for it.
SIZES = [100, 100_000]
# How long a request of the session may take beside half requests.
WITHIN = 3.0
# How long half a request has waited before others come.
BEFORE = 0.3
# Which of the half requests the owner's own listener has: nothing limits these but their client.
DIRECT = len(SIZES)


async def play(world, short):
    sessions = SHORT if short else SESSIONS
    # Half requests at three instances and then at two, and whole ones at as many.
    world.facts.note("plan", scenario="half", calls=sessions * (3 + 2) * (len(SIZES) + 1))
    owner, other, third = world.nodes
    opened = [await world.session(owner.endpoint) for _ in range(sessions)]
    await asyncio.gather(*(_halves(world, session, [owner, other, third], short, DIRECT) for session in opened))
    # The owner leaves, and the first request that another instance has of the session is a half one.
    await owner.leave()
    try:
        await asyncio.gather(*(_halves(world, session, [other, third], short, 0) for session in opened))
    finally:
        await owner.restart()
    for session in opened:
        await asyncio.gather(*(session.whose(node.endpoint, f"after {session.id}") for node in world.nodes))


async def _halves(world, session, nodes, short, direct):
    """Half requests of each size at these instances, and a whole one at each beside them."""
    halves = [Call(session, "half", "half", filler="." * size) for _ in nodes for size in SIZES]
    endpoints = [node.endpoint for node in nodes for _ in SIZES]
    limit = BODY_IDLE + 2 * BODY_IDLE_SEEN
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

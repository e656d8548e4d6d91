"""Redis is slow, with a latency of 300 ms. Clients have calls on one instance until the balancer cuts them all off at
once. They resume through another instance, and wait as long as `Retry-After` asks if they are refused."""

import asyncio
import random

from ..referee import LEASE
from ..tcp_proxy import TcpProxy
from ..world import GRACE

DELAYS = [0.3, 0.45]
SHORT_DELAYS = [0.3]
CALLS = 600
SHORT = 150
AT_A_TIME = 50
# The latest resume after the cut. Half of the clients resume at once, and the others at times up to the end of the
# grace.
LAST = GRACE - 0.05
# At the end, the owner of one in this many sessions is checked.
EACH = 25
# HAProxy takes up to 200 ms to detect that an instance is back.
DETECTION_TIME = 0.5


async def play(world, short):
    calls, delays = (SHORT, SHORT_DELAYS) if short else (CALLS, DELAYS)
    world.facts.note("plan", scenario="slow", calls=calls * len(delays))
    # The third instance is not involved in the calls.
    nodes = world.nodes[:2] if short else world.nodes
    async with TcpProxy((world.redis.host, world.redis.port)) as proxy:
        try:
            await _renew(world, nodes, "--redis", f"redis://{proxy.host}:{proxy.port}")
            for delay in delays:
                proxy.delay = delay / 2
                await _check(world, proxy, delay)
                await _storm(world, calls)
            proxy.delay = 0.0
        finally:
            await _renew(world, nodes)


async def _renew(world, nodes, *options):
    await asyncio.gather(*(node.leave() for node in nodes))
    await asyncio.gather(*(node.restart(*options) for node in nodes))
    await world.settle()


async def _check(world, proxy, delay):
    """Checks that Redis is as slow as intended."""
    begun = asyncio.get_running_loop().time()
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    writer.write(b"PING\r\n")
    pong = await reader.readline()
    writer.close()
    seconds = asyncio.get_running_loop().time() - begun
    world.facts.note("check", scenario="slow", what="delay", right=pong == b"+PONG\r\n" and seconds >= delay, seconds=seconds)


async def _storm(world, number):
    owner, other, third = world.nodes
    for node in (other, third):
        await world.balancer.take_out(node)
    try:
        turns, dice = asyncio.Semaphore(AT_A_TIME), random.Random(3)
        # No instance cancels a call before it has known the directory to be consistent for this long.
        proved = asyncio.create_task(asyncio.sleep(LEASE))
        calls = await asyncio.gather(*(_begin(world, turns) for _ in range(number)))
        await world.balancer.put_back(other)
        await asyncio.sleep(DETECTION_TIME)
        await proved
        await world.balancer.take_out(owner)
        await world.balancer.cut(owner)
        pauses = [max(0.0, dice.uniform(-LAST, LAST)) for _ in calls]
        await asyncio.gather(*(_resume(world, turn, *pair) for turn, pair in enumerate(zip(calls, pauses))))
        endpoints = [node.endpoint for node in world.nodes]
        whose = [call.session.whose(endpoint, f"after {call.tag}") for call in calls[::EACH] for endpoint in endpoints]
        await asyncio.gather(*whose)
        await asyncio.gather(*(_delete(world, turns, call) for call in calls))
    finally:
        for node in (owner, third):
            await world.balancer.put_back(node)


async def _begin(world, turns):
    async with turns:
        return await world.call("slow", "resumes", world.front)


async def _resume(world, turn, call, pause):
    await call.until_cut_off()
    call.cut()
    is_disconnected = turn % 3 == 0
    if is_disconnected:
        # The answer is sent while the client is disconnected.
        await world.release(call)
    await asyncio.sleep(pause)
    await call.resume(world.front, obeys=True)
    if not is_disconnected:
        await world.release(call)
    await call.end(world.front)


async def _delete(world, turns, call):
    async with turns:
        await call.session.delete(world.front)

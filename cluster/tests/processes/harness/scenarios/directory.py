"""Redis is killed and comes back empty, is stopped, and answers nobody for a while."""

import asyncio
import signal

from ..world import GRACE

OUTAGES = [("kill", 1), ("kill", 5), ("kill", 60), ("stop", 5), ("pause", 5)]
SHORT = [("kill", 4), ("stop", 4)]
# For each instance, as the owner.
GROUPS = 2
CALLS = 7
# What an orphan may take from when the directory is back, beside its grace, and a little more to see it.
LATE = 5.0


async def play(world, short):
    outages = SHORT if short else OUTAGES
    groups = len(world.nodes) * (1 if short else GROUPS)
    world.facts.note("plan", scenario="directory", calls=len(outages) * groups * CALLS)
    for how, seconds in outages:
        await _outage(world, how, seconds, groups)


async def _outage(world, how, seconds, groups):
    away, back, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    told = [asyncio.create_task(_group(world, number, away, back, over)) for number in range(groups)]
    await asyncio.sleep(1.5)
    if how == "pause":
        await world.redis.ask(f"CLIENT PAUSE {seconds * 1000} ALL")
    elif how == "stop":
        world.redis.signal(signal.SIGSTOP)
    else:
        await world.redis.kill()
    world.facts.note("away", what="redis", how=how)
    away.set()
    await asyncio.sleep(seconds)
    if how == "stop":
        world.redis.signal(signal.SIGCONT)
    elif how == "kill":
        await world.redis.start()
    await world.redis.ready()
    world.facts.note("returned", what="redis")
    back.set()
    await asyncio.sleep(GRACE + LATE)
    over.set()
    await asyncio.gather(*told)
    await world.settle()


async def _group(world, number, away, back, over):
    """Clients of an instance, of another that relays to it, and of a third that knows nothing of the session."""
    owner, other, third = (node.door for node in world.turn(number))
    by_owner = await world.call("directory", "stay", owner)
    by_relay = await world.call("directory", "stay", owner, through=other)
    back_late = await world.call("directory", "back", owner)
    leaving = [await world.call("directory", "gone", owner, through=door) for door in (owner, other)]
    before = await world.call("directory", "gone", owner, through=other)
    poking = asyncio.create_task(_poke(world, [by_owner.session, by_relay.session, back_late.session], over))
    await asyncio.sleep(0.0)
    cutting = asyncio.create_task(_before(away, before))
    await away.wait()
    await asyncio.sleep(0.3)
    await world.release(by_owner)
    for call in [back_late, *leaving]:
        call.cut(reset=number % 2 == 0)
    coming = asyncio.create_task(back_late.back(third, 90.0))
    # It begins without the directory.
    opened = await world.call("directory", "back", owner)
    await by_owner.until_over()
    await back.wait()
    await world.release(by_relay)
    await by_relay.until_over()
    await coming
    await world.release(back_late)
    await back_late.end(third)
    opened.cut()
    await opened.back(third)
    await world.release(opened)
    await opened.end(third)
    await over.wait()
    await asyncio.gather(poking, cutting)
    for call in (by_owner, by_relay):
        call.close()
        await asyncio.gather(*(call.session.whose(node.door, f"after {call.tag}") for node in world.nodes))


async def _before(away, call):
    """Cut off while the directory was there, and it is gone before the grace is over."""
    await asyncio.sleep(0.5)
    if not away.is_set():
        call.cut()


async def _poke(world, sessions, over):
    while not over.is_set():
        for session in sessions:
            await session.poke(world.front, limit=5.0)
        await asyncio.sleep(0.15)

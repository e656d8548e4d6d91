"""All instances are restarted, one after another, while clients make calls that are shorter than a drain.

Each instance is first taken out of the balancer, because the kernel resets connections that reach a listener while it
is being closed, which no program can prevent.
"""

import asyncio
import random
import signal

from ..client import Call
from ..world import DRAIN

RESTARTS = 10
SHORT = 1
CLIENTS = 12
LONGEST = 1.0
# How many calls each client makes at least during a restart.
CALLS = 3
# Pause between two instances, because HAProxy takes up to 200 ms to detect one that has been restarted.
PAUSE = 0.5
# How long a connection that the balancer has started can take to arrive.
TRANSIT_TIME = 0.1

assert LONGEST < DRAIN


async def play(world, short):
    restarts = SHORT if short else RESTARTS
    over, dice = asyncio.Event(), random.Random(2)
    sessions = [await world.session(world.front) for _ in range(CLIENTS)]
    clients = [asyncio.create_task(_work(world, session, over, dice)) for session in sessions]
    for _ in range(restarts):
        for node in world.nodes:
            await world.balancer.take_out(node)
            await asyncio.sleep(TRANSIT_TIME)
            node.signal(signal.SIGTERM)
            await node.ended()
            await node.restart()
            await world.balancer.put_back(node)
            await asyncio.sleep(PAUSE)
    over.set()
    calls = sum(await asyncio.gather(*clients))
    enough = calls >= restarts * CLIENTS * CALLS
    world.facts.note("check", scenario="rolling", what="calls", right=enough, calls=calls, restarts=restarts)
    for session in sessions:
        await asyncio.gather(*(session.whose(node.endpoint, f"after {session.id}") for node in world.nodes))
    world.facts.note("plan", scenario="rolling", calls=calls)


async def _work(world, session, over, dice):
    """Makes one call after another in one session, and returns how many."""
    calls = 0
    while not over.is_set():
        calls += 1
        call = Call(session, "rolling", "resumes", seconds=dice.uniform(0.0, LONGEST))
        await call.ask(world.front, until_started=False)
        if dice.random() < 0.2 and call.last:
            call.cut()
        await call.end(world.front)
    return calls

"""Clients that are cut off once or twice: before the answer, within it and after it. They resume through whichever
instance the balancer selects."""

import asyncio
import random

from ..world import GRACE

CALLS = 600
SHORT = 72
# How many sessions there are at a time, with three concurrent calls each, whose streams have the same numbers.
AT_A_TIME = 24
# The client's state when the answer is sent.
VARIANTS = ["connected", "disconnected", "in transit"]


async def play(world, short):
    calls = SHORT if short else CALLS
    world.facts.note("plan", scenario="cuts", calls=calls)
    turns = asyncio.Semaphore(AT_A_TIME)
    dice = random.Random(1)
    await asyncio.gather(*(_run(world, turns, number, dice) for number in range(calls // 3)))


async def _run(world, turns, number, dice):
    async with turns:
        session = await world.session(world.front)
        stories = [_cut(world, session, VARIANTS[(number + turn) % 3], 1 + (number // 3 + turn) % 2, dice) for turn in range(3)]
        await asyncio.gather(*stories)
        await session.delete(world.front)


async def _cut(world, session, variant, times, dice):
    size = 60_000 if variant == "in transit" else 60
    call = await world.call("cuts", "resumes", world.front, session, size=size)
    for _ in range(times - 1):
        call.cut(dice.random() < 0.5)
        await asyncio.sleep(dice.uniform(0.0, GRACE / 3))
        await call.resume(world.front)
        await asyncio.sleep(dice.uniform(0.0, 0.2))
    if variant == "in transit":
        await world.release(call)
        await call.read_some(20_000)
    call.cut(dice.random() < 0.5)
    if variant == "disconnected":
        await world.release_until_ended(call)
    await asyncio.sleep(dice.uniform(0.0, GRACE / 3))
    await call.resume(world.front)
    if variant == "connected":
        await world.release(call)
    await call.end(world.front)

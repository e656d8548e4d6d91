"""Clients that disconnect for good: from their session's owner, from another instance, and after resuming at one."""

import asyncio

from ..world import GRACE

CALLS = 200
SHORT = 30
AT_A_TIME = 40


async def play(world, short):
    calls = SHORT if short else CALLS
    world.facts.note("plan", scenario="disconnects", calls=calls)
    turns = asyncio.Semaphore(AT_A_TIME)
    await asyncio.gather(*(_leave(world, turns, number) for number in range(calls)))


async def _leave(world, turns, number):
    async with turns:
        owner, other, third = (node.endpoint for node in world.turn(number))
        variant = ["owner", "relay", "resumed"][number // 3 % 3]
        call = await world.call("disconnects", "abandoned", owner, through=owner if variant == "owner" else other)
        if variant == "resumed":
            call.cut()
            await asyncio.sleep(GRACE / 4)
            await call.resume(third)
            await asyncio.sleep(0.1)
        call.cut(reset=number % 2 == 0)
        # The referee judges whether that was in time.
        await world.facts.until("ended", call.tag, 3 * GRACE + 4)

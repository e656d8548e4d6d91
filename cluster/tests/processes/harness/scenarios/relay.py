"""The instance that relays a call is killed, but not the owner."""

import asyncio

KILLS = 50
SHORT = 4
CALLS = 4


async def play(world, short):
    kills = SHORT if short else KILLS
    world.facts.note("plan", scenario="relay", calls=kills * CALLS)
    for number in range(kills):
        await _kill(world, number)


async def _kill(world, number):
    relay, owner, other = world.turn(number)
    calls = [await world.call("relay", "resumes", node.endpoint, through=relay.endpoint) for node in [owner, other] * (CALLS // 2)]
    await relay.kill()
    try:
        await asyncio.gather(*(_resume(world, turn, call) for turn, call in enumerate(calls)))
    finally:
        await relay.restart()


async def _resume(world, turn, call):
    await call.until_cut_off(5.0)
    if turn % 2:
        await world.release_until_ended(call)
    await call.resume(world.front)
    await world.release(call)
    await call.end(world.front)

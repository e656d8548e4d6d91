"""The owner is killed mid-call. Its clients are notified, receive answers that had already been retained, and continue
their sessions at other instances."""

import asyncio

KILLS = 50
SHORT = 4
# The numbers of calls at each kill.
LOST, KEPT, NEXT, OWNERS = 3, 1, 4, 3


async def play(world, short):
    kills = SHORT if short else KILLS
    world.facts.note("plan", scenario="owner", calls=kills * (LOST + KEPT + NEXT))
    for number in range(kills):
        await _kill(world, number)


async def _kill(world, number):
    owner, other, third = world.turn(number)
    endpoints = [owner.endpoint, other.endpoint, world.front]
    lost = [await world.call("owner", "lost", owner.endpoint, through=endpoint) for endpoint in endpoints[:LOST]]
    kept = await world.call("owner", "resumes", owner.endpoint, through=other.endpoint)
    kept.cut()
    await asyncio.sleep(0.1)
    await world.release_until_ended(kept)
    # Gives the directory time to get the answer.
    await asyncio.sleep(0.3)
    await owner.kill()
    try:
        await asyncio.gather(kept.resume(world.front), *(_lost(world, number, turn, call) for turn, call in enumerate(lost)))
        await kept.end(world.front)
        await _call_again(world, kept.session)
        # All requests arrive at once, and one instance claims the session.
        endpoints = [other.endpoint, third.endpoint, world.front] * 2
        for call in [*lost, kept]:
            group = f"after {call.tag}"
            await asyncio.gather(*(call.session.whose(endpoint, group) for endpoint in endpoints))
    finally:
        await owner.restart()


async def _lost(world, number, turn, call):
    if (number + turn) % 2:
        # The session continues before the client resumes the call, so the same stream numbers then belong to another
        # call.
        call.cut()
        await _call_again(world, call.session)
    else:
        await call.until_cut_off(5.0)
    await call.resume(world.front)
    await call.end(world.front)
    if not (number + turn) % 2:
        await _call_again(world, call.session)


async def _call_again(world, session):
    call = await world.call("owner", "resumes", world.front, session)
    await world.release(call)
    await call.end(world.front)

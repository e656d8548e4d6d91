"""The owner is stopped and goes on: for so long that the others wait for it, and for so long that it is given up."""

import asyncio
import signal

from ..client import PATIENCE
from ..wire import Broken, Response

# The head of a relayed GET is waited for 10 s. Until then the others wait with it, and after that it is given up.
STOPS = {9: "back", 10: "either", 14: "given_up"}
SHORT = {9: "back"}
GROUPS = 3
CALLS = 3
# An owner that was given up learns it from the directory.
AFTER = 5.0


async def play(world, short):
    stops = SHORT if short else STOPS
    world.facts.note("plan", scenario="stopped", calls=len(stops) * GROUPS * CALLS)
    for number, (seconds, story) in enumerate(stops.items()):
        await _stop(world, number, seconds, story)


async def _stop(world, number, seconds, story):
    owner, other, third = world.turn(number)
    calls = []
    for _ in range(GROUPS):
        calls.append(await world.call("stopped", "stay" if story == "back" else story, owner.door))
        calls.append(await world.call("stopped", story, owner.door, through=other.door))
        calls.append(await world.call("stopped", story, owner.door))
    cut = calls[2::CALLS]
    owner.signal(signal.SIGSTOP)
    world.facts.note("stopped", instance=owner.name, sessions=[call.session.id for call in calls])
    for call in cut:
        call.cut()
    waiting = [call.session.poke(third.door, seconds + PATIENCE) for call in calls]
    waiting += [call.back(third.door) for call in cut] if story != "given_up" else []
    waiting += [_look(call.session, third.door) for call in calls] if story == "given_up" else []
    waiting = [asyncio.create_task(wait) for wait in waiting]
    await asyncio.sleep(seconds)
    owner.signal(signal.SIGCONT)
    world.facts.note("continued", instance=owner.name)
    await asyncio.gather(*waiting)
    await asyncio.sleep(AFTER)
    for call in calls:
        doors = [node.door for node in world.nodes]
        await asyncio.gather(*(call.session.whose(door, f"after {call.tag}") for door in doors))
        await world.release(call)
    await asyncio.gather(*(call.end(third.door) for call in calls))


async def _look(session, door):
    """A stream of the session, which is waited for."""
    status = 0
    try:
        response = await Response.open(door, "GET", session.headers())
        status = (await response.head()).status
        response.cut()
    except Broken:
        pass
    session.facts.note("looked", session=session.id, status=status)

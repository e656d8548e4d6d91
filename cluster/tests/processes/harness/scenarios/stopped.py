"""The owner is stopped and goes on: for so long that the others wait for it, and for so long that it is given up."""

import asyncio
import signal

from ..client import PATIENCE
from ..wire import Broken, Response

# The head of a relayed GET is waited for 10 s.
STOPS = [10, 14]
SHORT = [10]
GROUPS = 3
CALLS = 3
AFTER = 4.0


async def play(world, short):
    stops = SHORT if short else STOPS
    world.facts.note("plan", scenario="stopped", calls=sum(_calls(seconds) for seconds in stops))
    for number, seconds in enumerate(stops):
        await _stop(world, number, seconds)


def _calls(seconds):
    return GROUPS * CALLS


async def _stop(world, number, seconds):
    owner, other, third = world.turn(number)
    is_given_up = seconds > 10
    story = "given_up" if is_given_up else "back"
    calls = []
    for _ in range(GROUPS):
        calls.append(await world.call("stopped", "given_up" if is_given_up else "stay", owner.door))
        calls.append(await world.call("stopped", story, owner.door, through=other.door))
        calls.append(await world.call("stopped", story, owner.door, through=owner.door))
    owner.signal(signal.SIGSTOP)
    world.facts.note("stopped", instance=owner.name, sessions=[call.session.id for call in calls])
    for call in calls[2::CALLS]:
        call.cut()
    looking = [asyncio.create_task(_look(call.session, third.door)) for call in calls] if is_given_up else []
    pokes = [asyncio.create_task(call.session.poke(third.door, seconds + PATIENCE)) for call in calls]
    coming = [] if is_given_up else [asyncio.create_task(call.back(third.door)) for call in calls[2::CALLS]]
    await asyncio.sleep(seconds)
    owner.signal(signal.SIGCONT)
    world.facts.note("continued", instance=owner.name)
    await asyncio.gather(*looking, *pokes, *coming)
    # It learns from the directory what it has lost.
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

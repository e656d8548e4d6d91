"""The owner is stopped and continued: once while the other instances are waiting for it, and once after they have
claimed its sessions.

In the second case, requests have been waiting in the owner's sockets: client calls and resumes, relayed calls, and the
second halves of calls whose first half had already arrived. None of them may start where the session no longer
exists."""

import asyncio
import signal

from ..client import TIMEOUT, Call
from ..wire import Broken, Response

# An instance waits 10 s for the head of a relayed GET, with the other requests waiting as well, before it gives up.
STOPS = {9: "resumes", 10: "either", 14: "given_up"}
SHORT = {9: "resumes", 12: "given_up"}
GROUPS = 3
CALLS = 3
# How many more calls wait in the owner's sockets if it is given up.
LATE = 3
# A relayed call waits there for less than 10 s until the owner continues.
RELAYED_BEFORE = 5.0
# How long a request takes to reach the owner.
ARRIVED = 0.3


async def play(world, short):
    stops = SHORT if short else STOPS
    given_up = list(stops.values()).count("given_up")
    world.facts.note("plan", scenario="stopped", calls=GROUPS * (len(stops) * CALLS + given_up * LATE))
    for number, (seconds, story) in enumerate(stops.items()):
        await _stop(world, number, seconds, story)


async def _stop(world, number, seconds, story):
    owner, other, third = world.turn(number)
    calls = []
    for _ in range(GROUPS):
        calls.append(await world.call("stopped", "stay" if story == "resumes" else story, owner.endpoint))
        calls.append(await world.call("stopped", story, owner.endpoint, through=other.endpoint))
        calls.append(await world.call("stopped", story, owner.endpoint))
    cut = calls[2::CALLS]
    late, rest = [], asyncio.Event()
    if story == "given_up":
        late = [Call(call.session, "stopped", "resumes") for call in calls]
        asking = [call.ask(owner.endpoint, until_started=False, until=rest) for call in late[2::CALLS]]
        asking = [asyncio.create_task(ask) for ask in asking]
        await asyncio.sleep(ARRIVED)
    owner.signal(signal.SIGSTOP)
    world.facts.note("stopped", instance=owner.name, sessions=[call.session.id for call in calls])
    for call in cut:
        call.cut()
    waiting = [call.session.poke(third.endpoint, seconds + TIMEOUT) for call in calls]
    waiting += [call.resume(third.endpoint) for call in cut] if story != "given_up" else []
    waiting = [asyncio.create_task(wait) for wait in waiting]
    if story == "given_up":
        looks = [asyncio.create_task(_look(call.session, third.endpoint)) for call in calls]
        waiting += [*looks, *asking]
        waiting += [asyncio.create_task(call.ask(owner.endpoint, until_started=False)) for call in late[0::CALLS]]
        waiting += [asyncio.create_task(call.resume(owner.endpoint)) for call in cut]
        # The signal takes a moment to take effect.
        await asyncio.sleep(ARRIVED)
        rest.set()
        await asyncio.sleep(seconds - ARRIVED - RELAYED_BEFORE)
        waiting += [asyncio.create_task(call.ask(other.endpoint, until_started=False)) for call in late[1::CALLS]]
        await asyncio.sleep(RELAYED_BEFORE)
        claimed = [look.done() and look.result() == 200 for look in looks]
        world.facts.note("check", scenario="stopped", what="claimed in the meantime", right=all(claimed), claimed=claimed)
    else:
        await asyncio.sleep(seconds)
    owner.signal(signal.SIGCONT)
    world.facts.note("continued", instance=owner.name)
    await asyncio.gather(*waiting)
    for call in [*calls, *late]:
        endpoints = [node.endpoint for node in world.nodes]
        await asyncio.gather(*(call.session.whose(endpoint, f"after {call.tag}") for endpoint in endpoints))
        await world.release(call)
    await asyncio.gather(*(call.end(third.endpoint) for call in [*calls, *late]))


async def _look(session, endpoint):
    """Opens a stream in the session and returns the status, or 0 if there is none."""
    status = 0
    try:
        response = await Response.open(endpoint, "GET", session.headers())
        status = (await response.head()).status
        response.cut()
    except Broken:
        pass
    session.facts.note("looked", session=session.id, status=status)
    return status

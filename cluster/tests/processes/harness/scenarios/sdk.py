"""Real SDKs, through whichever instances the balancer selects. They are cut off once or twice, before the answer,
within it and after it, and resume by themselves. They are silent for longer than a grace, call a tool that answers at
once, cancel, and delete their sessions. In the end their processes are killed."""

import asyncio
from typing import Awaitable, Callable, NamedTuple

from matrix.scenarios import late, none, in_transit, one, two

from ..sdk import SdkCall, program, sdks
from ..world import GRACE

# Sessions per SDK for each variant, and those whose process is killed.
EACH, KILLED = 10, 10
SHORT_EACH, SHORT_KILLED = 2, 4
# Concurrent sessions per SDK, because a Python client that opens many delays those that have to resume.
AT_A_TIME = 5


async def nothing(call):
    pass


async def silent(call):
    await call.streaming()
    await asyncio.sleep(GRACE + 0.5)
    call.finish()


async def cancel(call):
    await call.streaming()
    await call.leave("cancel")


async def delete(call):
    await call.streaming()
    await call.leave("delete")


class Variant(NamedTuple):
    """What happens to a call, and the tool's arguments."""

    play: Callable[[SdkCall], Awaitable[None]]
    asks: dict
    story: str = "resumes-by-itself"


VARIANTS = {
    "short": Variant(nothing, {"seconds": 0.0}),
    "uncut": Variant(none, {}),
    "silent": Variant(silent, {"events": 0}),
    "once": Variant(one, {"cuts": 1}),
    "once, silent": Variant(one, {"cuts": 1, "events": 0}),
    "twice": Variant(two, {"cuts": 2}),
    "disconnected": Variant(late, {"cuts": 1}),
    "in transit": Variant(in_transit, {"cuts": 1, "size": 60_000}),
    "cancel": Variant(cancel, {}, "ended-by-client"),
    "delete": Variant(delete, {}, "ended-by-client"),
}


async def play(world, short):
    each, killed = (SHORT_EACH, SHORT_KILLED) if short else (EACH, KILLED)
    clients = await sdks(world)
    world.facts.note("plan", scenario="sdk", calls=len(clients) * (len(VARIANTS) * each + killed))
    await asyncio.gather(
        *(_runs(world, client, each) for client in clients),
        *(_killed(world, client, killed) for client in clients),
    )


async def _runs(world, client, each):
    turns = asyncio.Semaphore(AT_A_TIME)
    calls = [(SdkCall(world, client, variant.story, name), variant) for _ in range(each) for name, variant in VARIANTS.items()]
    process = program(world, client, [call for call, _ in calls], client.key)
    await process.start("ready")
    try:
        await asyncio.gather(*(_run(process, call, variant, turns) for call, variant in calls))
    finally:
        await process.end()


async def _run(process, call, variant, turns):
    async with turns:
        await call.begin(process, **variant.asks)
        await variant.play(call)
        if variant.story == "resumes-by-itself":
            await call.answered()
        else:
            await call.cancelled()
        if not call.has_disconnected:
            await call.leave("delete")
        await call.close()


async def _killed(world, client, number):
    """Kills clients mid-call, half of which have already been cut off and have resumed."""
    calls = [SdkCall(world, client, "abandoned", "killed") for _ in range(number)]
    process = program(world, client, calls, f"{client.key}-killed")
    await process.start("ready")
    try:
        await asyncio.gather(*(_begin_and_cut(process, call, turn % 2) for turn, call in enumerate(calls)))
        for call in calls:
            call.kill()
        await asyncio.gather(*(call.until(call.over, GRACE + 8.0) for call in calls if call.find_event("started")))
    finally:
        process.kill()
        await asyncio.gather(*(call.close() for call in calls))


async def _begin_and_cut(process, call, cuts):
    await call.begin(process, cuts=cuts)
    await call.streaming()
    if cuts:
        call.cut()
        await call.back()

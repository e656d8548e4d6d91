"""A cancel, a DELETE, and answers to the tool's requests, all through an instance that is not the owner."""

import asyncio

EACH = 100
SHORT = 10
WHAT = ["cancel", "DELETE", "sampling", "elicitation"]


async def play(world, short):
    each = SHORT if short else EACH
    world.facts.note("plan", scenario="messages", calls=each * len(WHAT))
    for number in range(each):
        # A few calls at a time, because this is not a load test.
        await asyncio.gather(*((_stop if what in ("cancel", "DELETE") else _question)(world, what, number) for what in WHAT))


async def _stop(world, what, number):
    owner, other, third = (node.endpoint for node in world.turn(number))
    call = await world.call("messages", "ended-by-client", owner, through=owner if number % 2 else third)
    world.facts.note("sent", tag=call.tag, what=what)
    if what == "cancel":
        await call.session.notify(other, "notifications/cancelled", {"requestId": call.id})
    else:
        await call.session.delete(other)
    await world.facts.until("ended", call.tag, 3.0)
    call.close()


async def _question(world, what, number):
    owner, other, third = (node.endpoint for node in world.turn(number))
    session = await world.session(owner)
    call = await world.call("messages", "question", owner, session, through=owner if number % 2 else third,
                            tool="ask", what=what, events=0, until_started=False)
    try:
        question = await asyncio.wait_for(call.question, 10.0)
    except asyncio.TimeoutError:
        return call.close()
    word = f"word of {call.tag}"
    if what == "sampling":
        result = {"model": word, "role": "assistant", "content": {"type": "text", "text": "x"}}
    else:
        result = {"action": "accept", "content": {"word": word}}
    world.facts.note("sent", tag=call.tag, what=what)
    await session.reply(other, question, result)
    await world.facts.until("received", call.tag, 3.0)
    await call.end(other, 3.0)

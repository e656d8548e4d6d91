"""What a foreign client may try: other sessions' event ids, the instances' headers, and ids that are far too long."""

import asyncio
import json
import uuid

from ..client import Call
from ..wire import Broken, Response
from ..world import SECRET, fetch

EACH = 20
SHORT = 2
LONG = 1 << 20
# How long the foreign client reads a stream.
LISTEN = 0.7
# How many calls the victim makes for each attempt.
CALLS = 2


async def play(world, short):
    each = SHORT if short else EACH
    world.facts.note("plan", scenario="forged", calls=each * CALLS + each)
    for number in range(each):
        await _events(world, number)
        await _headers(world, number)
        await _long(world, number)


def _check(world, what, right, **more):
    world.facts.note("check", scenario="forged", what=what, right=bool(right), **more)


async def _events(world, number):
    """At every instance, a client in one session names another session's events."""
    owner, other, third = world.turn(number)
    kept = await world.call("forged", "resumes", owner.endpoint)
    kept.cut()
    await world.release_until_ended(kept)
    running = await world.call("forged", "resumes", owner.endpoint)
    other_sessions = [await world.session(node.endpoint) for node in (owner, other)]
    plain, incarnation, call_number, request = kept.last.split("~")
    generation, call = f"{plain}~{incarnation}", f"{call_number}~{request}"
    event_ids = [kept.last, running.last, f"0/0~{incarnation}~{call}", f"0/0~{'0' * 16}~{call}", "0/0", "0/0~~~1",
                 f"{generation}~~", f"{generation}~{call_number}~%22{'x' * 300}%22", "~", f"{generation}~{call_number}~null",
                 f"{generation}~{request}"]
    tries = []
    for other_session in other_sessions:
        for endpoint in (owner.endpoint, other.endpoint, third.endpoint, world.front):
            tries += [_resume_from(world, other_session, endpoint, event_id, [kept, running]) for event_id in event_ids]
    await asyncio.gather(*tries)
    await kept.resume(other.endpoint)
    await kept.end(other.endpoint)
    await world.release(running)
    await running.end(other.endpoint)


async def _resume_from(world, other_session, endpoint, event_id, victims):
    headers, received, status = other_session.headers({"last-event-id": event_id}), [], 0
    try:
        response = await (await Response.open(endpoint, "GET", headers)).head()
        status = response.status
        # A stream of the client's own session may stay open, without any data.
        await asyncio.wait_for(_listen(response, received), LISTEN)
    except asyncio.TimeoutError:
        response.cut()
    except Broken:
        pass
    is_silent = all(victim.tag not in "".join(received) for victim in victims)
    _check(world, "forged event", is_silent and status in (200, 400, 404, 409), status=status, name=event_id, received=received[:5])


async def _listen(response, received):
    async for _, data in response.events():
        received.append(data)


async def _headers(world, number):
    """A client sends headers that only instances send."""
    owner, other, third = world.turn(number)
    session = await world.session(owner.endpoint)
    note = json.dumps({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}).encode()
    for name in ("mcp-cluster", "MCP-Cluster-Client", "mcp-cluster-client"):
        for value in (SECRET, "relay", "moved", "10.0.0.1:1"):
            for endpoint in (owner.endpoint, other.endpoint, world.front):
                status, headers, _ = await fetch(endpoint, "POST", session.headers({name: value}), note)
                right = status == 202 and not any(name.startswith("mcp-cluster") for name in headers)
                _check(world, "forged header", right, status=status, endpoint=endpoint.name)
            unknown = {**session.headers({name: value}), "mcp-session-id": str(uuid.uuid4())}
            status, headers, _ = await fetch(third.endpoint, "POST", unknown, note)
            _check(world, "forged header of no session", status == 404, status=status)
    # The peer listener is sent no secret, or a wrong one.
    peers = owner.endpoint._replace(port=int(owner.peers.rpartition(":")[2]))
    for forged in ({}, {"mcp-cluster": "relay"}, {"mcp-cluster": f"{SECRET}x"}, {"mcp-cluster": SECRET[:-1]}):
        status, _, _ = await fetch(peers, "POST", session.headers(forged), note)
        _check(world, "peer listener", status == 403, status=status)
    # A request with the secret is never relayed, even if its session is not local.
    unknown = {**session.headers({"mcp-cluster": SECRET}), "mcp-session-id": str(uuid.uuid4())}
    status, _, _ = await fetch(peers, "POST", unknown, note)
    _check(world, "one hop", status == 421, status=status)


async def _long(world, number):
    """A client sends ids of 1 MB."""
    owner, other, third = world.turn(number)
    session = await world.session(owner.endpoint)
    long = "x" * LONG
    note = json.dumps({"jsonrpc": "2.0", "method": "notifications/roots/list_changed"}).encode()
    for endpoint in (owner.endpoint, other.endpoint, world.front):
        for field in ("mcp-session-id", "last-event-id"):
            headers = {**session.headers(), field: long}
            status, _, _ = await fetch(endpoint, "GET" if field == "last-event-id" else "POST", headers, note)
            # 0: the connection was closed before the whole request had been read.
            _check(world, f"long {field}", status in (0, 400, 404, 414, 431), status=status, endpoint=endpoint.name)
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": long}}
        status, _, _ = await fetch(endpoint, "POST", session.headers(), json.dumps(cancel).encode())
        _check(world, "long cancel", status == 202, status=status, endpoint=endpoint.name)
    call = Call(session, "forged", "resumes")
    call.id = long
    await call.ask(other.endpoint)
    await world.release(call)
    await call.end(other.endpoint)
    _check(world, "session still found", await session.poke(third.endpoint) == 202)

"""What is done to a call's connections, for each row of the matrix."""

import asyncio
from dataclasses import dataclass, field
from typing import Awaitable, Callable

# A server's set-up: the reconnect delay and a session call's grace, both in milliseconds, and whether it has an event store.
QUICK = {"retry": 300, "grace": 6000, "store": False}
DEFAULTS = {"retry": 3000, "grace": None, "store": False}
STRICT = {"retry": 2500, "grace": 1000, "store": False}
STORED = {"retry": 350, "grace": 6000, "store": True}


@dataclass(frozen=True, eq=False)
class Scenario:
    key: str
    title: str
    play: Callable[["Cell"], Awaitable[None]]
    server: dict
    # Length of the answer in bytes.
    answer: int = 200
    # After how many seconds the client gives up.
    timeout: float = 10.0
    # Whether the scenario makes sense without a session, where nothing can be resumed.
    stateless: bool = False
    # Whether the client gets a process of its own, which is then killed.
    killed: bool = False
    # The progress that the client must receive along with its result.
    progress: list = field(default_factory=list)


async def none(cell):
    await cell.streaming()
    cell.finish()


async def one(cell):
    await cell.streaming()
    cell.cut()
    await cell.back()
    cell.finish()


async def two(cell):
    await cell.streaming()
    cell.cut()
    await cell.back(1)
    cell.cut(reset=True)
    await cell.back(2)
    cell.finish()


async def three(cell):
    await cell.streaming()
    cell.cut()
    await cell.back(1)
    cell.cut(reset=True)
    await cell.back(2)
    cell.cut()
    await cell.back(3)
    # The Python SDK resumes twice at most, after which its call is an orphan.
    if len(cell.proxy.of_call()) > 3:
        cell.finish()


async def polled(cell):
    """The server ends each resumed stream, so the client has to resume again."""
    await cell.streaming()
    cell.cut()
    # Some clients only resume once.
    await cell.until(lambda: len(cell.proxy.of_call()) > 3, 2.5)
    cell.finish()


async def killed(cell):
    await cell.streaming()
    cell.kill()
    await cell.cancelled()


async def closed(cell):
    await cell.streaming()
    await cell.leave("close")
    await cell.cancelled()


async def refused(cell):
    await cell.streaming()
    cell.refuse()
    await cell.cancelled()


async def late(cell):
    await cell.streaming()
    cell.refuse()
    await asyncio.sleep(0.1)
    cell.finish()
    await cell.until(cell.over, 5.0, "the handler did not finish")
    cell.accept_again()


async def late_and_cut(cell):
    await late(cell)
    # Limits what the client receives after it has resumed.
    cell.proxy.limit = 20_000


async def in_transit(cell):
    cell.proxy.limit = 20_000
    await cell.streaming()
    cell.finish()


async def progress(cell):
    await cell.streaming()
    await cell.progress()
    await cell.seen(2)
    cell.refuse()
    await cell.progress()
    cell.accept_again()
    await cell.back()
    await cell.progress()
    cell.finish()


async def listening(cell):
    await cell.streaming()
    proxy = cell.proxy
    await cell.until(lambda: any(get.status == 200 for get in proxy.standalone_gets()), 5.0, "it does not listen")
    before = len(proxy.standalone_gets())
    proxy.cut(proxy.standalone_gets())
    await cell.until(lambda: len(proxy.standalone_gets()) > before, 2.5)
    cell.finish()


async def short_grace(cell):
    await cell.streaming()
    cell.refuse()
    # Longer than the grace, but shorter than the reconnect delay.
    await asyncio.sleep(1.5)
    cell.accept_again()
    await cell.back()
    cell.finish()


# rmcp repeats the event that the client names, with and without the layer.
REPEATED = [1, 1, 2, 3]

SCENARIOS = [
    Scenario("no-cut", "no cut", none, QUICK, stateless=True),
    Scenario("one-cut", "one cut", one, QUICK, stateless=True),
    Scenario("two-cuts", "two cuts", two, QUICK),
    Scenario("three-cuts", "three cuts", three, QUICK),
    Scenario("polled", "cut, answer from an event store", polled, STORED),
    Scenario("killed", "client killed", killed, QUICK, stateless=True, killed=True),
    Scenario("closed", "client closed in its call", closed, QUICK, stateless=True),
    Scenario("refused", "cut, never let back", refused, QUICK, stateless=True),
    Scenario("late-answer", "cut, handler done before it is back", late, QUICK),
    Scenario("late-and-cut", "the same, cut again inside the answer", late_and_cut, QUICK, answer=300_000),
    Scenario("on-its-way", "cut inside the answer", in_transit, QUICK, answer=300_000, stateless=True),
    Scenario("progress", "progress before, in and after a cut", progress, QUICK, progress=REPEATED),
    Scenario("get-cut", "only the standalone GET is cut", listening, QUICK),
    Scenario("short-grace", "cut, back after a retry that is longer than the grace", short_grace, STRICT),
    Scenario("one-cut-defaults", "one cut, all defaults", one, DEFAULTS, timeout=30.0),
    Scenario("refused-defaults", "never let back, all defaults", refused, DEFAULTS, timeout=40.0),
]

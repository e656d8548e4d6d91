"""Three instances of the server, HAProxy in front of them, and Redis."""

import asyncio
import uuid

from .client import Call, Session
from .network import ADDRESSES, HUB, INSIDE, Network
from .process import Balancer, Node, Redis
from .wire import Broken, Response

# How long calls wait for their clients, and how long they have to end when an instance leaves.
GRACE = 2.0
DRAIN = 5.0
# How long a client with a 503 counts as resuming. The scenarios' clients retry sooner.
BACKOFF = 3.0
SECRET = "a secret of instances"
NAMES = "abc"
# An instance does not answer "no such session" until the directory has been consistent for 6 s.
SETTLED_TIMEOUT = 30.0


class World:
    def __init__(self, facts, work, program, fault=None):
        self.facts = facts
        self.work = work
        self.redis = Redis("127.0.0.1", facts, work)
        options = options_of(self.redis.url, fault)
        self._new = lambda name: Node(name, "127.0.0.1", program, options, facts, work)
        self.nodes = [self._new(name) for name in NAMES]
        self.balancer = Balancer("127.0.0.1", facts, work)
        self.front = self.balancer.endpoint

    async def start(self):
        await self.redis.start()
        await self.redis.ready()
        for node in self.nodes:
            await node.start()
        for node in self.nodes:
            await node.ready()
        await self.balancer.start(self.nodes)
        await self.settle()

    async def end(self):
        ended = (process.kill() for process in [self.balancer, *self.nodes, self.redis])
        # A process that cannot be ended must not keep the others from ending.
        for error in filter(None, await asyncio.gather(*ended, return_exceptions=True)):
            self.facts.note("broken", what=repr(error))

    async def settle(self):
        """Waits until all instances have found the directory consistent for long enough."""
        await asyncio.gather(*(self._settled(node) for node in self.nodes))

    async def _settled(self, node):
        other_session = Session(self.facts, str(uuid.uuid4()))
        for _ in range(int(SETTLED_TIMEOUT / 0.2)):
            # No other session has this id, so the instance answers 404 once it has settled.
            if await other_session.notify(node.endpoint, "notifications/roots/list_changed") == 404:
                return
            await asyncio.sleep(0.2)
        self.facts.note("broken", what=f"{node.name} has not settled")

    async def join(self, name, *options):
        """Starts another instance, which the balancer does not know about, and returns it once it is ready."""
        node = self._new(name)
        self.nodes.append(node)
        await node.restart(*options)
        return node

    async def part(self, node):
        """Ends an instance that has joined."""
        await node.leave()
        self.nodes.remove(node)

    def node(self, name):
        return next(node for node in self.nodes if node.name == name)

    def turn(self, number):
        """Returns the instances, starting with a different one for each number."""
        start = number % len(self.nodes)
        return self.nodes[start:] + self.nodes[:start]

    async def session(self, endpoint):
        return await Session.open(self.facts, endpoint)

    async def call(self, scenario, story, endpoint, session=None, through=None, until_started=True, **more):
        """Makes a call, and returns it once its client has all events except the answer.

        The session is opened at `endpoint`. The call is sent to `through`, if given."""
        session = session or await self.session(endpoint)
        return await Call(session, scenario, story, **more).ask(through or endpoint, until_started)

    async def release(self, call, limit=20.0):
        """Releases the call at its instance once it has started. Does nothing if it does not start within `limit`."""
        started = await self.facts.until("started", call.tag, limit)
        if started:
            self.node(started["instance"]).release(call.tag)

    async def ended(self, calls, limit=30.0):
        """Returns when these calls have ended, or after `limit`."""
        await asyncio.gather(*(self.facts.until("ended", call.tag, limit) for call in calls))

    async def release_until_ended(self, call, limit=20.0):
        """Releases the call and returns when it has ended, or after twice the limit."""
        await self.release(call, limit)
        await self.facts.until("ended", call.tag, limit)


class NetworkWorld(World):
    """Each instance and Redis have their own network. The balancer and the clients share one."""

    def __init__(self, facts, work, program, fault=None):
        self.facts = facts
        self.work = work
        self.network = Network()
        self.redis = Redis(ADDRESSES["redis"], facts, work, INSIDE)
        options = options_of(self.redis.url, fault)
        self.nodes = [Node(name, ADDRESSES[name], program, options, facts, work, INSIDE) for name in NAMES]
        self.balancer = Balancer(ADDRESSES[HUB], facts, work)
        self.front = self.balancer.endpoint

    async def start(self):
        processes = [*self.nodes, self.redis]
        for process in processes:
            await process.start()
        self.network.join({process.name: process.pid for process in processes})
        self.redis.write("")
        await self.redis.ready()
        for node in self.nodes:
            node.write("")
            await node.ready()
        await self.balancer.start(self.nodes)
        await self.settle()


def options_of(url, fault):
    options = ["--redis", url, "--grace", GRACE, "--drain", DRAIN, "--secret", SECRET, "--backoff", BACKOFF]
    return options + (["--fault", fault] if fault else [])


async def fetch(endpoint, method, headers, body=b""):
    """Returns a response's status, headers and text. The status is 0 if there is no response."""
    try:
        response = await (await Response.open(endpoint, method, headers, body)).head()
        return response.status, response.headers, await response.text()
    except Broken as error:
        return 0, {}, repr(error)

"""A TCP proxy between a client and its server, which cuts connections and can hold back new ones."""

import asyncio

from matrix.proxy import Proxy


class Relay(Proxy):
    """The interop tests' proxy, with a hold. While it is on hold, connections are accepted but transfer nothing, as in
    a failed network. They are not refused, because some clients give up after two refused attempts."""

    def __init__(self, port, changed):
        super().__init__(port, changed)
        self._open = asyncio.Event()
        self._open.set()

    def hold(self):
        self._open.clear()

    def accept_again(self):
        self._open.set()

    async def _serve(self, reader, writer):
        await self._open.wait()
        await super()._serve(reader, writer)

"""What is between a client and its server: a TCP proxy that cuts, and that can be slow to take new connections."""

import asyncio

from matrix.proxy import Proxy


class Relay(Proxy):
    """As that of the interop tests. While it holds, connections are taken and nothing passes on them, as in a network that is
    down: of clients that are refused some give up after two attempts."""

    def __init__(self, port, changed):
        super().__init__(port, changed)
        self._open = asyncio.Event()
        self._open.set()

    def hold(self):
        self._open.clear()

    def let_back(self):
        self._open.set()

    async def _serve(self, reader, writer):
        await self._open.wait()
        await super()._serve(reader, writer)

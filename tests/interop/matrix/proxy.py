"""A TCP proxy between one cell's client and the server, which cuts connections on demand."""

import asyncio
import socket
import struct
import time

from .wire import Exchange, Requests

# Makes closing send a reset instead of a FIN.
RESET = struct.pack("ii", 1, 0)
CHUNK = 1 << 16


class Link:
    """A connection from the client, and the one to the server."""

    def __init__(self, client, server):
        self.writers = (client, server)
        self.exchange = None

    def close(self, reset=False):
        for writer in self.writers:
            if reset:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()
            else:
                writer.close()


class Proxy:
    def __init__(self, port, changed):
        """Connects to the server at `port`. Calls `changed` after every change."""
        self.exchanges = []
        self.refused = 0
        self.refusing = False
        # After how many bytes of a response to the call, or to a resume of it, everything is cut, once.
        self.limit = None
        # When the last cut was made.
        self.cut_at = None
        # Whether the client's next request or close counts as a cut.
        self.leaving = False
        self._port = port
        self._changed = changed
        self._links = set()
        self._server = None

    async def start(self):
        """Returns the URL for the client."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/mcp"

    def stop(self):
        """Stops accepting connections, and cuts all of them."""
        self._server.close()
        self.cut()

    def of_call(self):
        """Returns the call's POST, then the GETs that resumed it."""
        event_ids = set()
        found = []
        for exchange in self.exchanges:
            if exchange.rpc == "tools/call" or (exchange.method == "GET" and exchange.last_event_id in event_ids):
                found.append(exchange)
                event_ids |= exchange.event_ids
        return found

    def standalone_gets(self):
        """Returns the GETs that do not resume the call, which are for the standalone stream."""
        of_call = self.of_call()
        return [exchange for exchange in self.exchanges if exchange.method == "GET" and exchange not in of_call]

    def cut(self, exchanges=None, reset=False):
        """Cuts these exchanges' connections, or all connections."""
        links = self._links if exchanges is None else {exchange.link for exchange in exchanges} & self._links
        for link in list(links):
            link.close(reset)
        if exchanges is None:
            self.cut_at = time.time()

    async def _serve(self, reader, writer):
        """Resets the connection while `refusing`. Otherwise passes bytes on until either side closes, then closes
        both."""
        if self.refusing:
            self.refused += 1
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
            self._changed()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        link = Link(writer, up_writer)
        self._links.add(link)
        try:
            pumps = self._up(link, reader, up_writer), self._down(link, up_reader, writer)
            done, pending = await asyncio.wait(
                [asyncio.ensure_future(pump) for pump in pumps], return_when=asyncio.FIRST_COMPLETED
            )
            for pump in (*done, *pending):
                pump.cancel()
        finally:
            link.close()
            self._links.discard(link)
            self._changed()

    async def _up(self, link, reader, writer):
        requests = Requests()
        while data := await received(reader):
            for method, headers, body in requests.feed(data):
                if self.leaving:
                    self._left()
                link.exchange = Exchange(link, time.time(), method, headers, body)
                self.exchanges.append(link.exchange)
            writer.write(data)
            self._changed()
        if self.leaving and link.exchange in self.of_call():
            self._left()

    def _left(self):
        self.leaving = False
        self.cut_at = time.time()

    async def _down(self, link, reader, writer):
        while data := await received(reader):
            exchange = link.exchange
            exchange.saw(data)
            if self.limit is not None and exchange.received > self.limit and exchange in self.of_call():
                writer.write(data[: self.limit - exchange.received])
                self.limit = None
                # The written bytes must reach the client before the connection is closed.
                await asyncio.sleep(0.1)
                self.cut()
                return
            writer.write(data)
            self._changed()


async def received(reader):
    """Returns the next bytes, or none at the end or after an error."""
    try:
        return await reader.read(CHUNK)
    except OSError:
        return b""

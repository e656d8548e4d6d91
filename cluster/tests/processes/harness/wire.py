"""Hand-written HTTP/1.1 and event streams. Each request has its own connection, which can be cut on demand."""

import asyncio
import socket
import struct
from typing import NamedTuple

LINE = 1 << 22
CONNECT_TIMEOUT = 5.0
# Longer than an instance waits for the head of a relayed response.
HEAD_TIMEOUT = 30.0
# The errors that a cut connection causes, whichever side has cut it.
Broken = (OSError, EOFError, asyncio.TimeoutError, ValueError)


class Endpoint(NamedTuple):
    """The address of the balancer or of an instance."""

    name: str
    host: str
    port: int


class Response:
    """One request and its response."""

    @classmethod
    async def open(cls, endpoint, method, headers, body=b"", kept=0):
        """Sends a request, except for the last `kept` bytes of its body, and returns at once."""
        self = cls()
        opened = asyncio.open_connection(endpoint.host, endpoint.port, limit=LINE)
        self._reader, self._writer = await asyncio.wait_for(opened, CONNECT_TIMEOUT)
        # The server accepts this machine's host names.
        lines = [f"{method} /mcp HTTP/1.1", "host: localhost", f"content-length: {len(body)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        sent, self._rest = body[:len(body) - kept], body[len(body) - kept:]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)
        return self

    def send_rest(self):
        """Sends the rest of the body."""
        self._writer.write(self._rest)

    async def head(self, limit=HEAD_TIMEOUT):
        """Reads the status and the headers."""
        try:
            head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), limit)
        except asyncio.LimitOverrunError as error:
            raise ValueError("a head without an end") from error
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return self

    async def events(self):
        """Yields each event's id and data."""
        event_id, data, rest = None, [], b""
        async for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                field, _, value = line.decode().rstrip("\r").partition(":")
                value = value.removeprefix(" ")
                if field == "id":
                    event_id = value
                elif field == "data":
                    data.append(value)
                elif not field and not value:
                    if event_id is not None or data:
                        yield event_id, "\n".join(data)
                    event_id, data = None, []

    async def some(self, size):
        """Reads exactly `size` bytes after the head, without parsing chunks and events."""
        await asyncio.wait_for(self._reader.readexactly(size), HEAD_TIMEOUT)

    async def text(self, limit=HEAD_TIMEOUT):
        """Returns the body."""
        async def whole():
            return b"".join([piece async for piece in self._pieces()])
        return (await asyncio.wait_for(whole(), limit)).decode(errors="replace")

    def cut(self, reset=False):
        """Closes the connection with a FIN or a reset, without ending the request."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort() if reset else self._writer.close()

    async def _pieces(self):
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readline(), 16):
                yield (await self._reader.readexactly(size + 2))[:size]
            return
        if "content-length" in self.headers:
            yield await self._reader.readexactly(int(self.headers["content-length"]))
            return
        while piece := await self._reader.read(1 << 16):
            yield piece

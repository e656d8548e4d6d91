"""A TCP proxy in this process, which can delay bytes and choose each connection's target."""

import asyncio

HOST = "127.0.0.1"
PIECE = 1 << 16


class TcpProxy:
    """Listens while its context is entered."""

    def __init__(self, *targets):
        # The targets as (host, port), which are used in turn. Without any, connections are closed at once.
        self.targets = targets
        # The delay of bytes in seconds, one way.
        self.delay = 0.0
        self._accepted = 0
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.host, self.port = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_error):
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            if not self.targets:
                return
            self._accepted += 1
            host, port = self.targets[self._accepted % len(self.targets)]
            there = await asyncio.open_connection(host, port)
            # When one direction ends, so does the connection.
            ways = [asyncio.create_task(self._pass_on(*way)) for way in ((reader, there[1]), (there[0], writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                there[1].close()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pass_on(self, reader, writer):
        pieces = asyncio.Queue()
        reading = asyncio.create_task(self._read(reader, pieces))
        try:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            reading.cancel()

    async def _read(self, reader, pieces):
        piece = None
        while piece != b"":
            try:
                piece = await reader.read(PIECE)
            except OSError:
                piece = b""
            pieces.put_nowait((asyncio.get_running_loop().time() + self.delay, piece))

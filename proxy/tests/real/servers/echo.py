"""A server that echoes its input, and records every byte that it receives and sends.

    python echo.py FILE stdio|json|sse|session

Each line of the file is ["got" or "sent", the message as text]. A request is answered with itself as the result. Before
the answer, where the transport allows it, the server sends the request as a notification and as a request of its own.
`json` answers with JSON, `sse` with events, and `session` with events in a session. Over HTTP, the first line on stdout
is the port.
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests" / "interop"))

from matrix.wire import Requests  # noqa: E402

FILE, MODE = sys.argv[1:]


class Number(str):
    """A number in its original spelling."""


def parse(raw):
    """Parses a message, leaving numbers as text."""
    return json.loads(raw, parse_int=Number, parse_float=Number)


def note(what, message):
    with open(FILE, "a") as file:
        file.write(json.dumps([what, message]) + "\n")


def answers(raw):
    """Records a message and yields the server's output for it."""
    note("got", raw)
    message = parse(raw)
    if "method" not in message or "id" not in message:
        return
    if message["method"] == "initialize":
        # A valid result, so that the session has the revision that the client requested.
        revision = json.dumps(message["params"]["protocolVersion"])
        raw = f'{{"protocolVersion":{revision},"capabilities":{{}},"serverInfo":{{"name":"echo","version":"0"}},"got":{raw}}}'
    elif MODE != "json":
        yield f'{{"jsonrpc":"2.0","method":"notifications/vendor","params":{{"got":{raw}}}}}'
        yield f'{{"jsonrpc":"2.0","id":"ask","method":"vendor/ask","params":{{"got":{raw}}}}}'
    number = isinstance(message["id"], Number)
    yield f'{{"jsonrpc":"2.0","id":{message["id"] if number else json.dumps(message["id"])},"result":{raw}}}'


def sent(raw):
    note("sent", raw)
    return raw


async def serve(reader, writer):
    requests = Requests()
    while data := await reader.read(1 << 16):
        for method, headers, body in requests.feed(data):
            if method != "POST":
                writer.write(b"HTTP/1.1 405 Method Not Allowed\r\ncontent-length: 0\r\n\r\n")
                continue
            said = [sent(answer).encode() for answer in answers(body.decode())]
            session = b"mcp-session-id: echo\r\n" if MODE == "session" else b""
            if not said:
                writer.write(b"HTTP/1.1 202 Accepted\r\n%scontent-length: 0\r\n\r\n" % session)
                continue
            kind = b"application/json" if MODE == "json" else b"text/event-stream"
            body = said[0] if MODE == "json" else b"".join(b"event: message\ndata: %s\n\n" % line for line in said)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%scontent-length: %d\r\n\r\n"
            writer.write(head % (kind, session, len(body)) + body)
    writer.close()


async def listen():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(json.dumps({"event": "listening", "port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


if MODE == "stdio":
    for line in sys.stdin.buffer:
        for answer in answers(line.removesuffix(b"\n").decode()):
            sys.stdout.buffer.write(sent(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
else:
    asyncio.run(listen())

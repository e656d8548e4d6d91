"""Parses a client's HTTP/1.1 requests, and the part of each response that shows how far it has got."""

import json
import re

EVENT_ID = re.compile(rb"^id: ?(.*?)\r?$", re.MULTILINE)
HEAD_END = b"\r\n\r\n"
# Enough for a response's head and its first event.
MAX_KEPT = 4096


class Exchange:
    """One request from a client, and its response so far."""

    def __init__(self, link, at, method, headers, body):
        self.link = link
        self.at = at
        self.method = method
        self.last_event_id = headers.get("last-event-id")
        self.rpc = rpc_method(body)
        self.status = None
        self.event_ids = set()
        self.received = 0
        self._start = b""

    def saw(self, data):
        """Takes bytes of the response. Only the first ones are searched for event ids."""
        self.received += len(data)
        if len(self._start) >= MAX_KEPT:
            return
        self._start += data
        head, found, body = self._start.partition(HEAD_END)
        if found:
            self.status = int(head.split(b" ", 2)[1])
            self.event_ids.update(event_id.decode() for event_id in EVENT_ID.findall(body))

    def __str__(self):
        what = self.rpc or (f"from {self.last_event_id}" if self.last_event_id else "")
        return f"{self.method} {what}".strip() + f" -> {self.status} ({self.received} bytes)"


class Requests:
    """Splits a connection's bytes into requests: (method, headers, body) for every complete one."""

    def __init__(self):
        self._buffer = b""

    def feed(self, data):
        self._buffer += data
        while request := self._next():
            yield request

    def _next(self):
        head, found, rest = self._buffer.partition(HEAD_END)
        if not found:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body, found, rest = dechunked(rest)
        else:
            length = int(headers.get("content-length", 0))
            body, found, rest = rest[:length], len(rest) >= length, rest[length:]
        if not found:
            return None
        self._buffer = rest
        return first.split(" ")[0], headers, body


def dechunked(data):
    """Returns the body, whether it is complete, and the bytes after it. The body must not have trailers."""
    body = b""
    while True:
        size, found, data = data.partition(b"\r\n")
        if not found:
            return body, False, data
        size = int(size, 16)
        if len(data) < size + 2:
            return body, False, data
        body += data[:size]
        data = data[size + 2 :]
        if size == 0:
            return body, True, data


def rpc_method(body):
    """Returns a JSON-RPC message's method, or `None` if the body is not a message with one."""
    try:
        return json.loads(body)["method"]
    except (ValueError, KeyError, TypeError):
        return None

"""An MCP client in a browser, as a page of an allowed origin. It calls a tool, loses its connection, and gets the
answer."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from browser import until

PAGE = b"<!doctype html><html lang=en><meta charset=utf-8><title>client</title>"
SCRIPT = """
const [url] = arguments;
const headers = { accept: "application/json, text/event-stream", "content-type": "application/json" };
const post = (message, signal) =>
    fetch(url, { method: "POST", headers, body: JSON.stringify({ jsonrpc: "2.0", ...message }), signal });

// Reads events until one matches, and returns the match.
async function find(response, pattern) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
        const { value, done } = await reader.read();
        if (done) throw new Error(`the stream has ended without ${pattern}: ${text}`);
        text += value;
        const match = text.match(pattern);
        if (match) return match[1];
    }
}

async function play() {
    const clientInfo = { name: "page", version: "0" };
    const params = { protocolVersion: "2025-11-25", capabilities: {}, clientInfo };
    const hello = await post({ id: 0, method: "initialize", params });
    headers["mcp-session-id"] = hello.headers.get("mcp-session-id");
    await post({ method: "notifications/initialized" });
    const call = { name: "report", arguments: { cell: "page", seconds: 2, bytes: 0 }, _meta: { progressToken: "page" } };
    const connection = new AbortController();
    const stream = await post({ id: 1, method: "tools/call", params: call }, connection.signal);
    const id = await find(stream, /^id: ?(.+)$/m);
    connection.abort();
    const resumed = await fetch(url, { headers: { ...headers, "last-event-id": id } });
    const answer = await find(resumed, /^data: ?(.*"result".*)$/m);
    await fetch(url, { method: "DELETE", headers });
    return answer;
}
play().then((answer) => { window.answer = answer; }, (error) => { window.answer = String(error); });
"""


class Pages:
    """A web server whose pages have a different origin from the proxy."""

    def __init__(self):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def end(self):
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_):
        pass


async def resumes(browser, origin, url):
    """Checks that a page from this origin gets the answer to a call whose connection it has lost."""
    browser.open(origin)
    browser.run(SCRIPT, url)
    answer = await until("the page has its answer", lambda: browser.run("return window.answer"))
    assert answer.startswith("{"), answer
    assert json.loads(answer)["id"] == 1, answer


async def is_refused(browser, origin, url):
    """Checks that a page from an origin that is not allowed cannot read anything."""
    browser.open(origin)
    browser.run(SCRIPT, url)
    answer = await until("the page has an error", lambda: browser.run("return window.answer"))
    assert answer == "TypeError: Failed to fetch", answer
    # The browser logs the refusal.
    browser.console()

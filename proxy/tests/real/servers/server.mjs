// The TypeScript SDK, 1.x or 2.x, as a server with one tool, which works for a while and records its outcome.
//
//     node server.mjs sdk|server FACTS stdio|session|json|store|stateless|handler
//
// The first argument is the npm package of @modelcontextprotocol. `json` is `session` with answers in JSON, `store` has
// an event store, and `handler` is created by SDK 2.x's `createMcpHandler`. Over HTTP, the first line on stdout is the
// port.

import { AsyncLocalStorage } from 'node:async_hooks';
import { randomUUID } from 'node:crypto';
import { appendFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { setTimeout as sleep } from 'node:timers/promises';
import { z } from 'zod';

const [sdk, facts, mode] = process.argv.slice(2);
const { McpServer, StdioServerTransport, HttpTransport, createMcpHandler, toNodeHandler } =
    sdk === 'sdk' ? await version1() : await version2();

async function version1() {
    const { McpServer } = await import('@modelcontextprotocol/sdk/server/mcp.js');
    const { StdioServerTransport } = await import('@modelcontextprotocol/sdk/server/stdio.js');
    const { StreamableHTTPServerTransport } = await import('@modelcontextprotocol/sdk/server/streamableHttp.js');
    return { McpServer, StdioServerTransport, HttpTransport: StreamableHTTPServerTransport };
}

async function version2() {
    const { McpServer, createMcpHandler } = await import('@modelcontextprotocol/server');
    const { StdioServerTransport } = await import('@modelcontextprotocol/server/stdio');
    const { NodeStreamableHTTPServerTransport, toNodeHandler } = await import('@modelcontextprotocol/node');
    return { McpServer, StdioServerTransport, HttpTransport: NodeStreamableHTTPServerTransport, createMcpHandler, toNodeHandler };
}

function note(event, more) {
    appendFileSync(facts, JSON.stringify({ event, at: Date.now() / 1000, pid: process.pid, ...more }) + '\n');
}

// The response to the current request, in the mode in which its end is the only sign of a disconnect.
const served = new AsyncLocalStorage();

async function work({ cell, bytes }, context) {
    note('started', { cell });
    served.getStore()?.on('close', () => note('closed', { cell }));
    const signal = context.signal ?? context.mcpReq.signal;
    try {
        await sleep(1000 * Number(cell.split('/').at(-1)), undefined, { signal });
    } catch (error) {
        note('cancelled', { cell });
        throw error;
    }
    note('finished', { cell });
    return { content: [{ type: 'text', text: cell.padEnd(bytes, '.') }] };
}

function server() {
    const server = new McpServer({ name: 'real', version: '0' });
    const inputSchema = z.object({ cell: z.string(), bytes: z.number() });
    server.registerTool('work', { inputSchema }, work);
    return server;
}

// All events of all streams. An id is a number that does not identify its stream.
class Store {
    events = [];

    async storeEvent(stream, message) {
        return `${this.events.push({ stream, message }) - 1}`;
    }

    async replayEventsAfter(last, { send }) {
        const { stream } = this.events[Number(last)];
        for (const [number, event] of [...this.events.entries()]) {
            // A priming event has no message.
            if (number > Number(last) && event.stream === stream && event.message.jsonrpc) {
                await send(`${number}`, event.message);
            }
        }
        return stream;
    }
}

const sessions = new Map();

async function inSession(request, response) {
    let transport = sessions.get(request.headers['mcp-session-id']);
    if (!transport) {
        transport = new HttpTransport({
            sessionIdGenerator: randomUUID,
            enableJsonResponse: mode === 'json',
            eventStore: mode === 'store' ? new Store() : undefined,
            retryInterval: mode === 'store' ? 1000 : undefined,
            onsessioninitialized: id => sessions.set(id, transport),
            onsessionclosed: id => sessions.delete(id),
        });
        await server().connect(transport);
    }
    await transport.handleRequest(request, response);
}

async function stateless(request, response) {
    const transport = new HttpTransport({ sessionIdGenerator: undefined });
    const instance = server();
    response.on('close', () => instance.close());
    await instance.connect(transport);
    await transport.handleRequest(request, response);
}

// Once it has garbage-collected a request, Node might not notify the listeners of its signal (nodejs/node#55428).
function byHandler(handler) {
    return (request, response) => served.run(response, () => handler(request, response));
}

note('born', {});
if (mode === 'stdio') {
    await server().connect(new StdioServerTransport());
} else {
    const handlers = { session: inSession, json: inSession, store: inSession, stateless };
    const handler = handlers[mode] ?? byHandler(toNodeHandler(createMcpHandler(server)));
    const listener = createServer(handler);
    listener.listen(0, '127.0.0.1', () => {
        console.log(JSON.stringify({ event: 'listening', port: listener.address().port }));
    });
    // An unhandled rejection in one cell must not end the others.
    process.on('unhandledRejection', error => console.error(error));
    process.stdin.on('end', () => process.exit()).resume();
}

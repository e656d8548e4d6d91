// The TypeScript SDK, 1.x or 2.x, as the client in several concurrent cells.
//
//     node client.mjs sdk|client [2026]
//
// The first argument is the npm package from @modelcontextprotocol; `2026` enables SDK 2.x's version negotiation,
// which is disabled by default. Orders are lines of JSON on stdin: {"open": cell, "url", "arguments", "timeout"}
// connects and calls the tool, {"cancel": cell} cancels its call, {"delete": cell} deletes its session, and {"close":
// cell} closes it. Events are written to stdout.

import { createInterface } from 'node:readline';

const [sdk, revision] = process.argv.slice(2);
const { Client, StreamableHTTPClientTransport } =
    sdk === 'sdk'
        ? {
              ...(await import('@modelcontextprotocol/sdk/client/index.js')),
              ...(await import('@modelcontextprotocol/sdk/client/streamableHttp.js')),
          }
        : await import('@modelcontextprotocol/client');

// Per cell: the client, its transport, and the controller that cancels its call.
const opened = new Map();

function emit(event, more) {
    process.stdout.write(JSON.stringify({ event, at: Date.now() / 1000, ...more }) + '\n');
}

async function open({ open: cell, url, arguments: its, timeout }) {
    const mode = revision === '2026' ? { pin: '2026-07-28' } : 'legacy';
    const client = new Client({ name: 'interop', version: '0' }, { versionNegotiation: { mode } });
    client.onerror = error => process.stderr.write(`${cell}: ${error}\n`);
    const transport = new StreamableHTTPClientTransport(new URL(url));
    const cancel = new AbortController();
    opened.set(cell, { client, transport, cancel });
    const progress = [];
    try {
        await client.connect(transport);
        const call = { name: 'work', arguments: its };
        const onprogress = event => progress.push(event.progress);
        const options = { timeout: timeout * 1000, onprogress, signal: cancel.signal };
        const result = sdk === 'sdk'
            ? await client.callTool(call, undefined, options)
            : await client.callTool(call, options);
        emit('outcome', { cell, text: result.content[0].text, progress });
    } catch (error) {
        emit('outcome', { cell, error: `${error}` });
    }
}

async function close({ close: cell }) {
    await opened.get(cell)?.client.close();
    emit('closed', { cell });
}

// An unhandled rejection in one cell must not end the others.
process.on('unhandledRejection', error => process.stderr.write(`unhandled: ${error}\n`));

emit('ready', {});
for await (const line of createInterface({ input: process.stdin })) {
    const order = JSON.parse(line);
    if ('open' in order) open(order);
    else if ('cancel' in order) opened.get(order.cancel).cancel.abort();
    else if ('delete' in order) opened.get(order.delete).transport.terminateSession();
    else close(order);
}
process.exit();

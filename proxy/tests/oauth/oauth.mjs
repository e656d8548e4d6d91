// OAuth through the proxy, with the TypeScript SDK's client, authorization server and server.
//
//     node oauth.mjs PROGRAM
//
// The authorization server issues tokens only for the public URL. The MCP server identifies itself by its own address,
// as it would without a proxy, and accepts only tokens for the URL that its client used, which express reads from
// X-Forwarded-Host and -Proto.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import http from "node:http";
import { createInterface } from "node:readline";

import express from "express";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { UnauthorizedError } from "@modelcontextprotocol/sdk/client/auth.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { DemoInMemoryAuthProvider } from "@modelcontextprotocol/sdk/examples/server/demoInMemoryOAuthProvider.js";
import { requireBearerAuth } from "@modelcontextprotocol/sdk/server/auth/middleware/bearerAuth.js";
import { createOAuthMetadata, getOAuthProtectedResourceMetadataUrl, mcpAuthMetadataRouter, mcpAuthRouter } from "@modelcontextprotocol/sdk/server/auth/router.js";
import { McpServer } from "@modelcontextprotocol/sdk/server/mcp.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";

const ANY = "--listen=127.0.0.1:0";
const REDIRECT = "http://127.0.0.1:1/callback";
const program = process.argv[2];
// The resources that the authorization server issues tokens for.
const resources = new Set();
const ends = [];

async function listen(handler) {
    const server = http.createServer(handler);
    ends.push(() => server.closeAllConnections());
    server.unref();
    await once(server.listen(0, "127.0.0.1"), "listening");
    return server.address().port;
}

async function authorizationServer() {
    const app = express();
    const port = await listen(app);
    const issuerUrl = new URL(`http://127.0.0.1:${port}`);
    const provider = new DemoInMemoryAuthProvider((resource) => resources.has(String(resource)));
    app.use(mcpAuthRouter({ provider, issuerUrl, scopesSupported: ["mcp:tools"] }));
    return { provider, oauthMetadata: createOAuthMetadata({ provider, issuerUrl, scopesSupported: ["mcp:tools"] }) };
}

/** Returns the MCP server's URL, and the audiences of the tokens that it has accepted. */
async function mcpServer({ provider, oauthMetadata }) {
    const app = express();
    const accepted = [];
    app.set("trust proxy", "loopback");
    const url = new URL(`http://127.0.0.1:${await listen(app)}/mcp`);
    app.use(mcpAuthMetadataRouter({ oauthMetadata, resourceServerUrl: url }));
    const resourceMetadataUrl = getOAuthProtectedResourceMetadataUrl(url);
    app.use("/mcp", (request, response, next) => {
        const expectedResource = `${request.protocol}://${request.host}/mcp`;
        requireBearerAuth({ verifier: provider, resourceMetadataUrl, expectedResource })(request, response, next);
    });
    app.post("/mcp", express.json(), async (request, response) => {
        accepted.push(request.auth.resource.href);
        const server = new McpServer({ name: "oauth", version: "1" });
        server.registerTool("who", {}, () => ({ content: [{ type: "text", text: request.ip }] }));
        const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined });
        response.on("close", () => void server.close());
        await server.connect(transport);
        await transport.handleRequest(request, response, request.body);
    });
    app.all("/mcp", (_, response) => void response.status(405).end());
    return { url, accepted };
}

/** Starts the program and returns its port. */
async function proxy(upstream, ...options) {
    const child = spawn(program, [`--upstream=${upstream}`, ...options], { stdio: ["ignore", "ignore", "pipe"] });
    ends.push(() => child.kill("SIGKILL"));
    for await (const line of createInterface({ input: child.stderr })) {
        const port = /listening on http:\/\/127\.0\.0\.1:(\d+)/.exec(line)?.[1];
        if (port) {
            child.stderr.resume();
            return port;
        }
    }
    throw new Error("the program has exited");
}

/** Returns a free port, for the program to take at once. */
async function freePort() {
    const server = http.createServer();
    await once(server.listen(0, "127.0.0.1"), "listening");
    const { port } = server.address();
    server.close();
    await once(server, "close");
    return port;
}

/** Starts a reverse proxy that changes `Host` and sends the original as `X-Forwarded-Host`, and returns its port. */
async function front(port) {
    return listen((request, response) => {
        const headers = { ...request.headers, host: `127.0.0.1:${port}`, "x-forwarded-host": request.headers.host, "x-forwarded-proto": "http", "x-forwarded-for": "192.0.2.7" };
        const onward = http.request({ host: "127.0.0.1", port, path: request.url, method: request.method, headers }, (answer) => {
            response.writeHead(answer.statusCode, answer.headers);
            answer.pipe(response);
        });
        onward.on("error", () => response.destroy());
        request.pipe(onward);
    });
}

/** The SDK's OAuth client, with a user who allows everything. */
class User {
    redirectUrl = REDIRECT;
    clientMetadata = { client_name: "test", redirect_uris: [REDIRECT], grant_types: ["authorization_code"], response_types: ["code"], token_endpoint_auth_method: "none" };

    clientInformation() {
        return this.information;
    }

    saveClientInformation(information) {
        this.information = information;
    }

    tokens() {
        return this.saved;
    }

    saveTokens(tokens) {
        this.saved = tokens;
    }

    saveCodeVerifier(verifier) {
        this.verifier = verifier;
    }

    codeVerifier() {
        return this.verifier;
    }

    async redirectToAuthorization(url) {
        this.resource = url.searchParams.get("resource");
        const answer = await fetch(url, { redirect: "manual" });
        this.code = new URL(answer.headers.get("location")).searchParams.get("code");
    }
}

/** Calls a tool at a URL after going through the whole flow. Returns its text, and the resource that the client asked for. */
async function call(url) {
    const user = new User();
    const first = new StreamableHTTPClientTransport(new URL(url), { authProvider: user });
    const hello = () => new Client({ name: "test", version: "1" });
    await assert.rejects(hello().connect(first), UnauthorizedError);
    await first.finishAuth(user.code);
    const client = hello();
    await client.connect(new StreamableHTTPClientTransport(new URL(url), { authProvider: user }));
    const result = await client.callTool({ name: "who" });
    await client.close();
    return { text: result.content[0].text, resource: user.resource };
}

async function main() {
    const authorization = await authorizationServer();
    const { url, accepted } = await mcpServer(authorization);

    // Without a proxy, the server can be reached at its own URL.
    resources.add(url.href);
    assert.deepEqual(await call(url.href), { text: "127.0.0.1", resource: url.href });
    resources.clear();

    // The control: the client refuses metadata for another server.
    const bare = await proxy(url, ANY);
    await assert.rejects(call(`http://localhost:${bare}/mcp`), /does not match expected/);
    console.log("without --public-url, the client refuses the server");

    const port = await freePort();
    const named = await proxy(url, `--listen=127.0.0.1:${port}`, `--public-url=http://localhost:${port}`);
    const publicUrl = `http://localhost:${named}/mcp`;
    resources.add(publicUrl);
    accepted.length = 0;
    assert.deepEqual(await call(publicUrl), { text: "127.0.0.1", resource: publicUrl });
    assert.deepEqual(new Set(accepted), new Set([publicUrl]));
    console.log("with --public-url, the client gets a token for that URL, and the server accepts it");

    // The reverse proxy's port is not the program's.
    const behind = await proxy(url, ANY, "--trust-forwarded=127.0.0.1");
    const outer = `http://localhost:${await front(behind)}/mcp`;
    resources.clear();
    resources.add(outer);
    accepted.length = 0;
    assert.deepEqual(await call(outer), { text: "192.0.2.7", resource: outer });
    assert.deepEqual(new Set(accepted), new Set([outer]));
    console.log("behind a reverse proxy in --trust-forwarded, the same is true of its URL");

    const distrustful = await proxy(url, ANY);
    const other = `http://localhost:${await front(distrustful)}/mcp`;
    await assert.rejects(call(other), /does not match expected/);
    console.log("a reverse proxy that is not in --trust-forwarded cannot change the URL");
}

try {
    await main();
} finally {
    ends.forEach((end) => end());
}

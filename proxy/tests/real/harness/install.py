"""Installs pinned versions of the clients, the servers and the proxy into one folder, concurrently."""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from matrix.install import HERE as INTEROP
from matrix.install import NPM, PIP, ROOT, Client, command, npm_install, pip_install, version

HERE = Path(__file__).resolve().parent.parent
SERVER_2 = "@modelcontextprotocol/server@2.4.0 @modelcontextprotocol/node@2.1.2"


@dataclass(frozen=True)
class Upstream:
    """A server that the proxy fronts, in one of its modes."""

    key: str
    title: str
    # Its command, without its facts file and its mode.
    start: tuple
    mode: str
    # Whether its tool cannot be stopped by a cancel.
    sync: bool = False
    # Whether it supports the revision without sessions.
    modern: bool = False

    @property
    def stdio(self):
        return self.mode == "stdio"

    @property
    def sessions(self):
        return self.mode in ("session", "json", "store", "stdio")

    def command(self, facts):
        return [*self.start, facts, self.mode, *(["sync"] if self.sync else [])]


async def install(cache, program):
    """Returns the clients, the upstreams, and the proxy's binary."""
    if missing := [tool for tool in ("cargo", "node", "npm") if shutil.which(tool) is None]:
        raise SystemExit(f"not found: {', '.join(missing)}")
    npm = {**NPM, "ts2-server": SERVER_2}
    proxy, *_ = await asyncio.gather(
        build(program),
        *(npm_install(cache / key, packages) for key, packages in npm.items()),
        *(pip_install(cache / key, package) for key, package in PIP.items()),
    )
    # Modules are resolved from the script's folder.
    for key in ("ts1", "ts2-server"):
        shutil.copy(HERE / "servers" / "server.mjs", cache / key)
    return list(clients(cache)), list(upstreams(cache)), proxy


def clients(cache):
    for key, start in (
        ("ts1", ["node", cache / "ts1" / "client.mjs", "sdk"]),
        ("ts2", ["node", cache / "ts2" / "client.mjs", "client"]),
        ("py1", [cache / "py1" / "bin" / "python", INTEROP / "clients" / "client.py"]),
        ("py2", [cache / "py2" / "bin" / "python", INTEROP / "clients" / "client.py", "legacy"]),
    ):
        yield Client(key, title(key), start)
    yield Client("py2-2026", f"{title('py2')}, 2026", [cache / "py2" / "bin" / "python", INTEROP / "clients" / "client.py"], False)
    yield Client("ts2-2026", f"{title('ts2')}, 2026", ["node", cache / "ts2" / "client.mjs", "client", "2026"], False)


def upstreams(cache):
    starts = {
        "py1": (cache / "py1" / "bin" / "python", HERE / "servers" / "server.py"),
        "py2": (cache / "py2" / "bin" / "python", HERE / "servers" / "server.py"),
        "ts1": ("node", cache / "ts1" / "server.mjs", "sdk"),
        "ts2": ("node", cache / "ts2-server" / "server.mjs", "server"),
    }
    for key, start in starts.items():
        for mode in ("session", "json", "store", "stateless", "stdio"):
            # Besides sessions, the Python SDK 2.x serves the revision that has none, as the TypeScript SDK does with
            # createMcpHandler. With JSON, the Python SDK does not notice a disconnect, and without a session no cancel
            # can be sent to it.
            modern = key == "py2" and mode not in ("stdio", "json")
            yield Upstream(f"{key}-{mode}", f"{title(key)} {mode}", start, mode, modern=modern)
        if key.startswith("py"):
            for mode in ("session", "stdio"):
                yield Upstream(f"{key}-{mode}-sync", f"{title(key)} {mode}, synchronous", start, mode, sync=True)
    yield Upstream("ts2-handler", f"{title('ts2')} createMcpHandler", starts["ts2"], "handler", modern=True)


def title(key):
    return f"{'Python' if key.startswith('py') else 'TypeScript'} {version({**NPM, **PIP}[key])}"


async def build(program):
    if program:
        return program.resolve()
    manifest = ROOT / "proxy" / "Cargo.toml"
    await command("cargo", "build", "--quiet", "--locked", "--manifest-path", manifest, "--target-dir", ROOT / "target")
    return ROOT / "target" / "debug" / "mcp-cancel-proxy"

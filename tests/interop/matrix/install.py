"""Installs pinned versions of the clients and the server into one folder, concurrently."""

import asyncio
import fcntl
import shutil
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent

NPM = {"ts1": "@modelcontextprotocol/sdk@1.32.2", "ts2": "@modelcontextprotocol/client@2.4.0"}
PIP = {"py1": "mcp==1.30.0", "py2": "mcp==2.3.0"}
RMCP = "3.11"


@dataclass(frozen=True, eq=False)
class Client:
    key: str
    title: str
    command: list
    # Whether it uses a revision with sessions, so that it can resume.
    sessions: bool = True


async def install(cache):
    """Installs everything. Returns the clients and the server's program."""
    demand("cargo", "curl")
    with_sessions, binaries = await asyncio.gather(install_sdks(cache, [*NPM, *PIP]), cargo_build())
    clients = [
        *with_sessions,
        Client("rmcp", f"rmcp {RMCP}", [binaries / "client"]),
        Client("curl", "curl in a script", [sys.executable, HERE / "clients" / "curl.py"]),
        Client("py2", f"Python {version(PIP['py2'])}", python(cache, "py2"), sessions=False),
        Client("ts2-2026", f"TypeScript {version(NPM['ts2'])}, pinned", typescript(cache, "ts2", "client", "2026"), sessions=False),
        Client("rmcp-2026", f"rmcp {RMCP}, discover", [binaries / "client", "--2026"], sessions=False),
    ]
    return clients, binaries / "server"


async def install_sdks(cache, keys):
    """Installs the SDKs in these packages, as clients with sessions."""
    demand("node", "npm")
    npm = [npm_install(cache / key, NPM[key]) for key in keys if key in NPM]
    pip = [pip_install(cache / key, PIP[key]) for key in keys if key in PIP]
    await asyncio.gather(*npm, *pip)
    sdks = {
        "ts1": Client("ts1", f"TypeScript {version(NPM['ts1'])}", typescript(cache, "ts1", "sdk")),
        "ts2": Client("ts2", f"TypeScript {version(NPM['ts2'])}", typescript(cache, "ts2", "client")),
        "py1": Client("py1", f"Python {version(PIP['py1'])}", python(cache, "py1")),
        "py2": Client("py2-legacy", f"Python {version(PIP['py2'])}, legacy", python(cache, "py2", "legacy")),
    }
    return [sdks[key] for key in keys]


def typescript(cache, key, *args):
    return ["node", cache / key / "client.mjs", *args]


def python(cache, key, *args):
    return [cache / key / "bin" / "python", HERE / "clients" / "client.py", *args]


def demand(*programs):
    """Exits if any of these programs is not installed."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise SystemExit(f"not found: {', '.join(missing)}")


def version(package):
    return package.replace("==", "@").rpartition("@")[2]


async def npm_install(folder, packages):
    folder.mkdir(parents=True, exist_ok=True)
    async with installing(folder, packages) as wanted:
        # Modules are resolved from the script's folder. The script is replaced in one go, because another process may
        # be loading it.
        script = folder / "client.mjs"
        shutil.copy(HERE / "clients" / "client.mjs", script.with_suffix(".new"))
        script.with_suffix(".new").replace(script)
        if wanted:
            (folder / "package.json").write_text('{"private": true}')
            await command("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *packages.split(), cwd=folder)


async def pip_install(folder, package):
    folder.mkdir(parents=True, exist_ok=True)
    async with installing(folder, package) as wanted:
        if wanted:
            await command(sys.executable, "-m", "venv", folder)
            await command(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)


async def cargo_build():
    target = ROOT / "target"
    manifest = HERE / "server" / "Cargo.toml"
    await command("cargo", "build", "--quiet", "--locked", "--manifest-path", manifest, "--target-dir", target)
    return target / "debug"


async def command(*words, cwd=None):
    """Runs a command. If it fails, exits with its output."""
    process = await asyncio.create_subprocess_exec(
        *map(str, words), cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} failed:\n{output.decode()}")


@asynccontextmanager
async def installing(folder, packages):
    """Yields whether to install the packages into the folder, and records them there afterwards. Processes that share
    the folder wait for the one that is installing."""
    marker = folder / ".installed"
    with open(folder / ".lock", "w") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        wanted = not marker.exists() or marker.read_text() != packages
        yield wanted
        if wanted:
            marker.write_text(packages)

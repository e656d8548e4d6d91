"""Memory of an idle program, and of calls in flight."""

import time

from . import load, memory
from .front import Running
from .section import MB, MIB, Section, Target

SESSIONS = 10
CALLS = 1000
MOST_IDLE = 25
MOST_A_CALL = 8

TEXT = f"""\
Memory of a bridge with all its processes, but without the servers behind it: as started, after a call, and with {CALLS:,} calls of \
{SESSIONS} sessions in flight. Each call has its own connection, and only the beginning of its stream has arrived. Each connection \
was already open, after an earlier call: *a connection of its client* is what it took then. *A call in flight* includes its \
connection. The values for a call and for a connection are growth of PSS, which counts a shared page in part. Each row is a new process.

*A connection to the server* is what hyper's client takes for a call in flight in a program that does nothing else: `load` itself. \
It applies to bridges that speak HTTP to the server, of which only the proxy was measured. *Beyond its connections* is the rest, for which \
the bridge itself is responsible."""


def measure(fronts, programs, work, short):
    rows, targets = [], []
    to_server = None
    for front in fronts:
        if not front.command:
            to_server = to_server or a_connection_to(front.target, programs)
            continue
        with Running(front, work) as running:
            idle = memory.of(running.process.pid, programs)
            warm, opened, held, begun = growth(running, programs)
        is_http = front.base == "bare"
        a_call = a_piece(warm, held)
        a_connection = a_piece(warm, opened)
        beyond = a_call - a_connection - (to_server if is_http else 0)
        rows.append([
            front.title, "HTTP" if is_http else "stdio", f"{idle.rss / MIB:.1f}", f"{idle.pss / MIB:.1f}", f"{warm.rss / MIB:.1f}",
            f"{held.rss / MIB:.1f}", f"{a_call:.1f}", f"{a_connection:.1f}", f"{to_server:.1f}" if is_http else "", f"{beyond:.1f}",
            f"{begun:,}",
        ])
        if front.ours:
            assert begun == CALLS, f"{front.key}: {begun} of {CALLS} calls in flight"
            targets.append(Target(f"idle, {front.key}: RSS", idle.rss / MB, MOST_IDLE, "MB"))
            targets.append(Target(f"a call in flight, beyond its connections, {front.key}", beyond, MOST_A_CALL, "KiB"))
        print(f"memory: {front.key}", flush=True)
    columns = [
        "", "server", "idle, RSS, MiB", "idle, PSS, MiB", "after a call, RSS, MiB", f"{CALLS:,} calls in flight, RSS, MiB",
        "a call in flight, KiB", "a connection of its client, KiB", "a connection to the server, KiB", "beyond its connections, KiB",
        "streams begun",
    ]
    return Section("Memory", TEXT, [("", columns, rows)], targets)


def growth(running, programs):
    """Returns the memory after a first call, with all connections, and with all calls on them, and the number of
    begun streams."""
    pid = running.process.pid
    with load.staying(programs, "hold", running.target, SESSIONS, 1, "echo"):
        first = memory.of(pid, programs)
        with load.begun(programs, "hold", running.target, SESSIONS, CALLS // SESSIONS, "echo") as clients:
            clients.wait()
            opened = memory.of(pid, programs)
            begun = clients.go_on()["begun"]
            # A server that has sent nothing may not have read everything.
            time.sleep(1)
            return first, opened, memory.of(pid, programs), begun


def a_connection_to(url, programs):
    """Returns the memory that hyper's client needs for a connection, in KiB."""
    with load.begun(programs, "upstream", url, CALLS) as clients:
        clients.wait()
        first = memory.of_process(clients.pid)
        clients.go_on()
        return a_piece(first, memory.of_process(clients.pid))


def a_piece(before, after):
    """Returns the growth for each call or connection, in KiB."""
    return (after.pss - before.pss) / CALLS / 1024

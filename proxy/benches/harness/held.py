"""Memory: of a program that does nothing, and of calls in flight."""

import time

from . import load, memory
from .front import Running
from .section import MB, MIB, Section, Target

SESSIONS = 10
CALLS = 1000
MOST_IDLE = 25
MOST_A_CALL = 8

TEXT = f"""\
Of a bridge with all its processes, but without the servers behind it: as started, after a call, and with {CALLS:,} calls of \
{SESSIONS} sessions in flight, each on a connection of its own, of which nothing but the beginning of the stream has come. For comparison \
{CALLS:,} connections that are open after a call each. What a call or a connection takes is the growth of PSS (a page that several \
processes share counts in part) since the first call. Each row is a new process.

What the proxy takes for a call is mostly its two connections. Of that of the client hyper has 16 KiB to \
read and 8 KiB to write, and a task is 2.5 KiB; of that to the server 8 KiB to read, 8 KiB to write, and 10 KiB for a queue. *More than a connection* is what a call takes beyond an open connection \
of its client; over HTTP the connection to the server is in it."""


def measure(fronts, programs, work, short):
    rows, targets = [], []
    for front in fronts:
        if not front.command:
            continue
        with Running(front, work) as running:
            idle = memory.of(running.process.pid, programs)
            warm, held, begun = growth(running, programs, "hold")
        with Running(front, work) as running:
            before, open_, _ = growth(running, programs, "echo")
        a_call = (held.pss - warm.pss) / CALLS / 1024
        a_connection = (open_.pss - before.pss) / CALLS / 1024
        behind = "HTTP" if front.base == "bare" else "stdio"
        rows.append([
            front.title, behind, f"{idle.rss / MIB:.1f}", f"{idle.pss / MIB:.1f}", f"{warm.rss / MIB:.1f}",
            f"{held.rss / MIB:.1f}", f"{a_call:.1f}", f"{a_connection:.1f}", f"{a_call - a_connection:.1f}", f"{begun:,}",
        ])
        if front.ours:
            assert begun == CALLS, f"{front.key}: {begun} of {CALLS} calls in flight"
            targets.append(Target(f"idle, {front.key}: RSS", idle.rss / MB, MOST_IDLE, "MB"))
            targets.append(Target(f"a call in flight, {front.key}", a_call, MOST_A_CALL, "KiB"))
        print(f"memory: {front.key}", flush=True)
    columns = [
        "", "server", "idle, RSS, MiB", "idle, PSS, MiB", "after a call, RSS, MiB",
        f"{CALLS:,} calls in flight, RSS, MiB", "a call in flight, KiB", "an open connection, KiB", "more than a connection, KiB", "streams begun",
    ]
    return Section("Memory", TEXT, [("", columns, rows)], targets)


def growth(running, programs, tool):
    """The memory after one such call and with all of them, and how many streams have begun."""
    pid = running.process.pid
    with load.staying(programs, "hold", running.target, SESSIONS, 1, "echo"):
        first = memory.of(pid, programs)
        with load.staying(programs, "hold", running.target, SESSIONS, CALLS // SESSIONS, tool) as said:
            # A server that says nothing yet may not have read all of it.
            time.sleep(1)
            return first, memory.of(pid, programs), said["begun"]

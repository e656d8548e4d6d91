"""Memory of unread events."""

import re
import time
import urllib.request

from . import load, memory
from .front import Running, free_port
from .section import MIB, Section, Target

SESSIONS = 40
# Number of calls of each session.
CALLS = 4
# Number of events of each call.
EVENTS = 256
EVENT = 16 * 1024
BUFFER = 64
# Time in seconds for which the processes are observed after the last call.
WATCHED = 4.0

TEXT = f"""\
{SESSIONS} sessions call {CALLS} times each, and the server sends {EVENTS} progress events of {EVENT // 1024} KiB for each call, \
{SESSIONS * CALLS * EVENTS * EVENT // MIB} MiB in all. Half of the clients disconnect when the stream has begun. The others stay \
connected and read nothing. *Counted* is the maximum of `mcp_proxy_buffer_bytes`, with the default `--buffer` of {BUFFER} MiB. *Grew \
by* is the maximum of the PSS, minus the PSS after the first call. A bridge that grows little may have dropped events: this table does \
not show which clients can still receive them."""


def measure(fronts, programs, work, short):
    rows, targets = [], []
    for front in fronts:
        if not front.command:
            continue
        admin = free_port()
        options = ["--admin", f"127.0.0.1:{admin}", "--buffer", f"{BUFFER}MiB"] if front.ours else []
        counts = front.ours and front.key != "forward"
        with Running(front, work, *options) as running:
            grown, counted, refused = most(running, programs, admin if counts else None)
        behind = "HTTP" if front.base == "bare" else "stdio"
        rows.append([front.title, behind, f"{grown:.1f}", f"{counted:.1f}" if counts else "", refused])
        if counts:
            targets.append(Target(f"flood, {front.key}: counted", counted, BUFFER, "MiB"))
        print(f"flood: {front.key}", flush=True)
    return Section("Memory in a flood", TEXT, [("", ["", "server", "grew by, MiB", "counted, MiB", "calls refused"], rows)], targets)


def most(running, programs, admin):
    """Returns the largest growth and the largest count of the proxy itself, in MiB, and the number of refused calls."""
    pid = running.process.pid
    with load.staying(programs, "hold", running.target, 1, 1, "echo"):
        first = memory.of(pid, programs).pss
        grown = counted = 0
        with load.begun(programs, "flood", running.target, SESSIONS, CALLS, EVENTS, EVENT) as clients:
            said = None
            while said is None or time.monotonic() < until:
                grown = max(grown, memory.of(pid, programs).pss - first)
                counted = max(counted, buffered(admin) if admin else 0)
                if said is None and (said := clients.there()):
                    until = time.monotonic() + WATCHED
                time.sleep(0.02)
    return grown / MIB, counted / MIB, said["refused"]


def buffered(admin):
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/metrics") as metrics:
        gauge = re.search(r"^mcp_proxy_buffer_bytes (\S+)$", metrics.read().decode(), re.MULTILINE)
    return float(gauge[1])

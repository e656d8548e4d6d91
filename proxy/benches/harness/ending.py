"""Time until the program has ended, with calls in flight."""

import signal
import time

from . import load
from .front import Running
from .section import Section, Target

SESSIONS = 10
CALLS = 1000
MOST = 10

TEXT = f"""\
Time from SIGTERM to the end of the process, with {CALLS:,} open streams of {SESSIONS} sessions, whose calls never end. By default the calls may \
continue for 8 s (`--drain`)."""


def measure(fronts, programs, work, short):
    rows, targets = [], []
    for front in fronts:
        if not front.ours:
            continue
        with Running(front, work) as running, load.staying(programs, "hold", running.target, SESSIONS, CALLS // SESSIONS, "hold") as said:
            assert said["begun"] == CALLS, said
            begun = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            code = running.process.wait(60)
            took = time.monotonic() - begun
        rows.append([front.key, f"{took:.2f}", code])
        targets.append(Target(f"SIGTERM to the end with {CALLS:,} open streams, {front.key}", took, MOST, "s", 2))
        targets.append(Target(f"exit code after it, {front.key}", code, 0, "", 0))
        print(f"end: {front.key}", flush=True)
    return Section("The end", TEXT, [("", ["", "ended after, s", "exit code"], rows)], targets)

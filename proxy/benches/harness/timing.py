"""The duration of a call, and the calls per second."""

import statistics
from contextlib import ExitStack

from . import load
from .front import Running
from .section import Section, Target, spread

CLIENTS = (1, 16)
# Number of rounds, and duration of a turn in seconds.
LONG = (15, 1.0)
SHORT = (3, 0.2)

MOST_ADDED = {"forward": 150, "resumable": 300}

TEXT = """\
A client calls a tool that returns its argument of 100 B at once, waits for the answer, and calls again. There are runs with \
{clients[0]} client, and with {clients[1]} clients at the same time, each with its own session and connection. All set-ups take turns \
of {seconds:g} s, in {rounds} rounds that each begin with another set-up. Figures are medians over the rounds, with the quartiles. \
*Added* is the difference from the bare server, or from the pipe, in the same round. All processes and the clients share the \
machine's processors, so a call also waits for the others."""

OVER = {
    "bare": """\
## Over HTTP

The server writes the head, the event and the end of its answer at once, and does almost nothing else. No real server is this fast, so \
these ratios are the worst case. With `--no-resumable` the proxy forwards and cancels. Without it, the proxy also keeps the events.""",
    "pipe": """\
## On stdin and stdout

The same server behind bridges, each in its mode with sessions and with minimal logging. mcp-cancel-proxy and supergateway start a \
process for each session, the others have one for all sessions. mcp-cancel-proxy keeps events for clients that resume, and so does \
mcp-proxy in TypeScript with `--eventStore`, its default. The others do not.""",
}


def measure(fronts, programs, work, short):
    rounds, seconds = SHORT if short else LONG
    figures = {(front.key, clients): [] for front in fronts for clients in CLIENTS}
    with ExitStack() as stack:
        running = [stack.enter_context(Running(front, work)) for front in fronts]
        for turn in range(rounds):
            first = turn % len(running)
            for clients in CLIENTS:
                for server in running[first:] + running[:first]:
                    figures[server.front.key, clients].append(load.calls(programs, server.target, clients, seconds))
            print(f"time: round {turn + 1} of {rounds}", flush=True)
    tables = []
    for base, text in OVER.items():
        group = [front for front in fronts if base in (front.key, front.base)]
        tables.append((text, *table(group, base, figures)))
    targets = [
        Target(f"p50 added by {name}, 1 client", statistics.median(added(figures, name, "bare", 1, "p50")), most, "µs")
        for name, most in MOST_ADDED.items()
    ]
    return Section("Time", TEXT.format(clients=CLIENTS, rounds=rounds, seconds=seconds), tables, targets)


def table(group, base, figures):
    columns = ["", "clients", "calls a second", "p50, µs", "p99, µs", "added to p50, µs", "added to p99, µs", "p50, ratio", "calls a second, ratio"]
    rows = []
    for clients in CLIENTS:
        for front in group:
            runs = figures[front.key, clients]
            row = [front.title, clients, *(spread([run[what] for run in runs]) for what in ("a_second", "p50", "p99"))]
            if front.key == base:
                row += [""] * 4
            else:
                row += [spread(added(figures, front.key, base, clients, what)) for what in ("p50", "p99")]
                row += [spread(ratios(figures, front.key, base, clients, what), 2) for what in ("p50", "a_second")]
            rows.append(row)
    return columns, rows


def added(figures, key, base, clients, what):
    return [run[what] - base_run[what] for run, base_run in zip(figures[key, clients], figures[base, clients])]


def ratios(figures, key, base, clients, what):
    return [run[what] / base_run[what] for run, base_run in zip(figures[key, clients], figures[base, clients])]

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
A client calls a tool that answers at once with the 100 B that it was told, waits for the answer, and calls again: {clients[0]} \
client, and {clients[1]} at the same time, each with a session and a connection of its own. All set-ups take turns of \
{seconds:g} s, {rounds} rounds of them, and start at another one in each. Figures are medians over the rounds, with the quartiles; \
what is added is the difference to the bare server, or to the pipe, in the same round. All processes and the clients share the \
machine's processors, so a call waits for them too."""

OVER = {
    "bare": """\
## Over HTTP

The server writes head, event and end of its answer at once, and does next to nothing else: no real one is so fast, so ratios \
are worse here than anywhere. With `--no-resumable` the proxy forwards and cancels; without, it also keeps what it forwards.""",
    "pipe": """\
## On stdin and stdout

The same server behind bridges, each in its mode with sessions, which log as little as they can. mcp-cancel-proxy and supergateway \
start a process for each session, the others have one for all. mcp-cancel-proxy keeps what it hands on for clients that come \
back, and so does mcp-proxy in TypeScript with `--eventStore`, its default; the others do not.""",
}


def measure(fronts, programs, work, short):
    rounds, seconds = SHORT if short else LONG
    figures = {(front.key, clients): [] for front in fronts for clients in CLIENTS}
    with ExitStack() as stack:
        running = [stack.enter_context(Running(front, work)) for front in fronts]
        for turn in range(rounds):
            first = turn % len(running)
            for clients in CLIENTS:
                for one in running[first:] + running[:first]:
                    figures[one.front.key, clients].append(load.calls(programs, one.target, clients, seconds))
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
            of = figures[front.key, clients]
            row = [front.title, clients, *(spread([one[what] for one in of]) for what in ("a_second", "p50", "p99"))]
            if front.key == base:
                row += [""] * 4
            else:
                row += [spread(added(figures, front.key, base, clients, what)) for what in ("p50", "p99")]
                row += [spread(ratios(figures, front.key, base, clients, what), 2) for what in ("p50", "a_second")]
            rows.append(row)
    return columns, rows


def added(figures, key, base, clients, what):
    return [one[what] - bare[what] for one, bare in zip(figures[key, clients], figures[base, clients])]


def ratios(figures, key, base, clients, what):
    return [one[what] / bare[what] for one, bare in zip(figures[key, clients], figures[base, clients])]

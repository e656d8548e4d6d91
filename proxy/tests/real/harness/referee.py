"""Judges a run from the fact files alone."""

import re
from datetime import datetime
from pathlib import Path

from .facts import read

# The library's log line for a cancel. If a server's tool blocks, it belongs to that server's only call.
CANCELLED = re.compile(r"^(\S+)Z +INFO call cancelled ", re.MULTILINE)


class Verdict:
    """The outcome of one cell."""

    def __init__(self, plan):
        self.plan = plan
        self.at = {}
        self.outcome = {}
        self.over = False
        self.broken = None

    def take(self, fact):
        # Later facts are about the end of the run, not about the call.
        if self.over:
            return
        self.over = fact["event"] == "end"
        self.at.setdefault(fact["event"], fact["at"])
        if fact["event"] == "outcome":
            self.outcome = fact
        if fact["event"] == "broken":
            self.broken = fact["what"]

    @property
    def tier(self):
        return self.plan["tier"]

    @property
    def row(self):
        return self.plan["upstream"], self.plan["client"]

    @property
    def late(self):
        """How late the tool was notified, or `None` if it was not. Some servers notice only that the connection has
        been closed."""
        notified = self.notified_at if self.plan["sync"] else self.at.get("closed", self.at.get("cancelled"))
        return None if notified is None or "cut" not in self.at else notified - self.at["cut"] - self.due

    @property
    def due(self):
        return self.plan["grace"] if self.tier == "proxy" else 0.0

    @property
    def answered(self):
        return self.outcome.get("text") == self.plan["expected"]

    @property
    def what(self):
        """The result to show in the table."""
        if self.broken:
            return "broken"
        if self.plan["scenario"] != "gone":
            return "answer" if self.answered else "cancelled" if "cancelled" in self.at else "lost"
        if self.late is None:
            return "keeps running"
        return f"{'notified: ' if self.plan['sync'] else ''}{self.due:.0f} s {1000 * self.late:+.0f} ms"

    @property
    def notified_at(self):
        """When the proxy logged a cancel to a server that it cannot stop. A cancel because the proxy itself is exiting
        does not count."""
        entry = CANCELLED.search(Path(self.plan["log"]).read_text())
        at = entry and datetime.fromisoformat(f"{entry[1]}+00:00").timestamp()
        return at if at and at < self.at.get("end", 0) else None

    def wrong(self, tolerance):
        """Returns what is wrong with a cell behind the proxy, or `None`."""
        if self.broken:
            return self.broken
        if self.plan["scenario"] != "gone":
            if "cancelled" in self.at:
                return "cancelled, although its client resumed"
            if not self.answered:
                return f"no answer: {self.outcome.get('error') or self.outcome.get('text', 'nothing')[:200]}"
            if "back" not in self.at or self.at["outcome"] < self.at["back"]:
                return "the answer arrived before its client resumed"
        elif self.late is None:
            return "never cancelled"
        elif self.late < -0.02:
            return f"cancelled {-self.late:.3f} s too early"
        elif self.late > tolerance[self.due > 0]:
            return f"cancelled {self.late:.3f} s too late"
        return None

    def control(self):
        """Returns what is wrong with a cell without the proxy, or `None`. A server that loses answers has to be seen
        losing them."""
        if self.plan["upstream"].endswith("-session") and self.plan["resumable"] and self.plan["scenario"] in ("gone", "late"):
            if self.answered or "cancelled" in self.at:
                return "without the proxy the call has to keep running or lose its answer, so this control shows nothing"
        return None


def judge(folder, tolerance):
    """Prints the table and the faults, and returns the number of faults. `tolerance` is how late a cancel may be, where
    nothing can be resumed and after a grace."""
    verdicts, faults = {}, []
    for fact in read(folder):
        if fact["event"] == "plan":
            verdicts[fact["cell"]] = Verdict(fact)
        elif fact.get("cell") in verdicts:
            verdicts[fact["cell"]].take(fact)
        elif fact["event"] == "left":
            faults += [f"process {pid} of {owner} is still running" for pid, owner in fact["pids"]]
        elif fact["event"] == "ended" and not fact["clean"]:
            faults.append(f"{fact['serving']}: the proxy did not exit by itself")
    for name, verdict in sorted(verdicts.items()):
        fault = verdict.wrong(tolerance) if verdict.tier == "proxy" else verdict.control()
        if fault:
            faults.append(f"{name}: {fault}")
    print(table(verdicts.values()))
    for line in summary([verdict for verdict in verdicts.values() if verdict.tier == "proxy"]):
        print(line)
    for fault in faults:
        print(f"WRONG {fault}")
    if not verdicts:
        faults.append("nothing was judged")
    return len(faults)


def table(verdicts):
    scenarios = ["gone", "resume", "late", "after-grace"]
    tiers = sorted({verdict.tier for verdict in verdicts})
    rows = {}
    for verdict in verdicts:
        rows.setdefault(verdict.row, {})[verdict.tier, verdict.plan["scenario"]] = verdict.what
    columns = [(tier, scenario) for tier in tiers for scenario in scenarios]
    columns = [column for column in columns if any(column in row for row in rows.values())]
    lines = [["upstream", "client", *(f"{tier}: {scenario}" for tier, scenario in columns)]]
    lines += [[*row, *(rows[row].get(column, "-") for column in columns)] for row in sorted(rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines)


def summary(verdicts):
    for what, has_grace in (("nothing to resume", False), ("after the grace", True)):
        late = sorted(1000 * verdict.late for verdict in verdicts if verdict.late is not None and (verdict.due > 0) == has_grace)
        if late:
            middle = late[len(late) // 2]
            yield f"notified, {what}: {len(late)} calls, median {middle:.0f} ms, worst {late[-1]:.0f} ms"
    for scenario in ("resume", "late", "after-grace"):
        cells = [verdict for verdict in verdicts if verdict.plan["scenario"] == scenario]
        if cells:
            yield f"{scenario}: {sum(verdict.answered for verdict in cells)} of {len(cells)} answers"

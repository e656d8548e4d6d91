"""Judges a soak from the fact files alone."""

from collections import Counter

from .actor import GRACE, LONG
from .facts import read

# How late a cancel may be on a busy machine, and how early, because three processes have their own clocks.
MARGIN = 2.0
EARLY = 0.05


class Call:
    def __init__(self):
        self.facts = []

    def at(self, event):
        return [fact["at"] for fact in self.facts if fact["event"] == event]

    def first(self, event):
        return next(iter(self.at(event)), None)

    def absences(self):
        """The intervals in which the client was disconnected."""
        left = None
        for fact in self.facts:
            if fact["event"] == "left":
                left = fact["at"]
            elif fact["event"] == "back" and left is not None:
                yield left, fact["at"]
                left = None
        if left is not None:
            yield left, float("inf")

    def may_be_cancelled(self, at, is_early):
        if any(notified is not None and notified - EARLY <= at for notified in (self.first("told"), self.first("deleted"))):
            return True
        # If the client disconnects before the first event id, the call may be cancelled at once.
        grace = 0.0 if is_early else GRACE
        return any(left + grace - EARLY <= at <= back + MARGIN for left, back in self.absences() if back - left >= grace)

    def is_orphan(self, cancelled):
        """Returns whether the client did not resume until after the grace, and before the tool had ended. On a busy
        machine starting a process may take longer than the client is disconnected."""
        return cancelled is not None and any(left + GRACE - EARLY <= cancelled for left, _ in self.absences())

    def judge(self, story):
        started, cancelled, finished = (self.first(event) for event in ("started", "cancelled", "finished"))
        if cancelled is not None and not self.may_be_cancelled(cancelled, story == "early"):
            yield "wrong cancel"
        if started is None:
            # The client did not wait for the server to accept the call.
            if story != "early":
                yield "never started"
            return
        due = {"gone": GRACE, "early": GRACE, "cancel": 0.0, "delete": 0.0}.get(story)
        if due is not None:
            since = max(self.first({"cancel": "told", "delete": "deleted"}.get(story, "left")), started)
            if cancelled is None or cancelled > since + due + MARGIN:
                yield "missed cancel"
        elif not self.first("answered") and not self.is_orphan(cancelled):
            yield "lost answer"
        if any(fact["event"] == "answered" and not fact["right"] for fact in self.facts):
            yield "wrong answer"
        if self.first("crossed"):
            yield "crossed sessions"
        if self.first("refused"):
            yield "refused"
        if len(self.at("started")) > 1:
            yield "ran twice"


def judge(folder):
    """Prints the counts and up to 40 faults. Returns the number of faults in calls by kind, and of all faults."""
    calls, faults, stories, deleted = {}, [], Counter(), {}
    for fact in read(folder):
        if "cell" in fact:
            calls.setdefault(fact["cell"], Call()).facts.append(fact)
        elif fact["event"] == "deleted":
            deleted[fact["tag"]] = fact
        elif fact["event"] == "left-over":
            faults += [f"a process is still running: {pid}" for pid in fact["pids"]]
        elif fact["event"] == "gauge" and fact["value"] != 0:
            faults.append(f"{fact['serving']}: {fact['name']} is {fact['value']} at the end")
        elif fact["event"] == "ended" and not fact["clean"]:
            faults.append(f"{fact['serving']}: the proxy did not exit by itself")
        elif fact["event"] == "broke":
            faults.append(f"{fact['tag']}: {fact['error']}")
        elif fact["event"] == "memory":
            print(f"{fact['serving']}: {fact['resident']} kB resident at the end, {fact['peak']} kB at most")
    counts = Counter()
    for cell, call in sorted(calls.items()):
        tag, _, story = cell.split("/")
        if tag in deleted:
            call.facts = sorted([*call.facts, deleted[tag]], key=lambda fact: fact["at"])
        stories[story] += 1
        for what in call.judge(story):
            counts[what] += 1
            facts = ", ".join(f"{fact['event']} {fact['at'] - call.facts[0]['at']:.2f}" for fact in call.facts)
            more = [str(fact.get("status", fact.get("error", ""))) for fact in call.facts if fact["event"] in ("refused", "failed")]
            faults.append(f"{what}: {cell}: {facts} {' '.join(more)}")
    print(f"{len(calls)} calls: {', '.join(f'{number} {story}' for story, number in sorted(stories.items()))}")
    named = ["wrong cancel", "missed cancel", "lost answer", "crossed sessions"]
    print(", ".join(f"{counts[what]} {what}" for what in [*named, *sorted(set(counts) - set(named))]))
    for fault in faults[:40]:
        print(f"WRONG {fault}")
    if not calls:
        faults.append("nothing was judged")
    return counts, len(faults)


assert LONG > GRACE + 2 * MARGIN

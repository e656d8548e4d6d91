"""What is expected of every cell. Bare rmcp's losses are expected too, and prove that the cuts are real."""

from dataclasses import dataclass

from .call import TOLERANCE

# How many requests a cell may make. After every cut a client reopens its streams, and some try several times.
REQUESTS = 14

RESUMES_IN_TIME = {"no-cut", "one-cut", "two-cuts", "progress", "get-cut", "one-cut-defaults"}
NEVER_RESUMES = {"killed", "refused", "refused-defaults"}
LATE = {"late-answer", "late-and-cut", "on-its-way"}

# These resume from the resumed stream's last event id, and not at all if it has none.
TYPESCRIPT = {"ts1", "ts2"}
# Both of these give up after two failed resumes.
PYTHON = {"py1", "py2-legacy"}
# When closed, these end their session and thereby their calls. Python 2.x also cancels the calls, which races with that.
DELETES = {"py1", "py2-legacy", "rmcp"}
# How long rmcp lets a deleted session's handlers run on.
DRAIN = 5.0
# The reason given for a call that its client has cancelled.
BY_ITS_CLIENT = "requested by the client"


@dataclass
class Expectation:
    what: str
    # For a cancel: how long after the disconnect, and for which reasons.
    earliest: float = 0.0
    latest: float = TOLERANCE
    reasons: tuple = ()
    # How many resumes are allowed after the end.
    polls: int = 0


def result():
    return Expectation("result")


def lost():
    return Expectation("lost")


def ran_on():
    return Expectation("ran on")


def at_once(*reasons):
    return Expectation("cancelled", reasons=reasons)


def orphan(cell):
    grace = cell.server.grace
    # This compares the clocks of three processes.
    return Expectation("cancelled", grace - 0.05, grace + TOLERANCE, ("did not resume within the grace period",))


def expected(cell):
    """Returns what the call is expected to result in."""
    client, scenario, bare = cell.client.key, cell.scenario.key, cell.tier == "bare"
    if not cell.client.sessions:
        # 2026-07-28: the end of the stream is the cancel, and an answer is only sent once.
        return {"no-cut": result, "on-its-way": lost}.get(scenario, at_once)()
    if scenario in RESUMES_IN_TIME:
        return result()
    if scenario == "polled":
        return lost() if client in TYPESCRIPT and cell.tier != "wrapped" else result()
    if scenario in LATE:
        return result() if cell.tier == "wrapped" else lost()
    if scenario == "short-grace":
        # No grace is shorter than the server's reconnect delay.
        return result()
    if scenario == "three-cuts" and client not in PYTHON:
        return result()
    if scenario == "closed" and client in DELETES:
        if cell.tier == "wrapped":
            return at_once("session closed", BY_ITS_CLIENT)
        return Expectation("cancelled", latest=DRAIN + TOLERANCE)
    assert scenario in NEVER_RESUMES | {"three-cuts", "closed"}
    return ran_on() if bare else orphan(cell)


def failures(cell, report, expectation):
    """Yields the expectations that were violated."""
    yield from report.notes
    if report.what != expectation.what:
        yield f"{report.what} instead of {expectation.what}"
        return
    if report.what == "cancelled":
        if not expectation.earliest <= report.after <= expectation.latest:
            yield f"cancelled after {report.after:.2f} s, not {expectation.earliest} to {expectation.latest} s"
        if expectation.reasons and not any(reason in (report.reason or "") for reason in expectation.reasons):
            yield f"the reason is {report.reason!r}"
    # With the layer alone, as without it, a client keeps resuming for a lost answer.
    if cell.tier == "wrapped" or report.what != "lost":
        if report.requests > REQUESTS:
            yield f"{report.requests} requests reached the server"
        if report.polls > expectation.polls:
            yield f"it resumed {report.polls} more times after the call had ended"


def server_failures(server, reports):
    """Yields the violated expectations of a whole server whose cells have these reports."""
    counts = server.counts
    if counts["in flight"]:
        yield f"{counts['in flight']} calls are still in flight"
    cancelled = counts["cancelled"] + counts["cancelled by the client"]
    # The layer alone cannot notice that a handler has finished for a client that does not resume.
    unobserved = sum(report.what == "lost" for report in reports) if server.tier == "layer" else 0
    if server.tier != "bare" and not 0 <= cancelled - server.cancelled <= unobserved:
        yield f"the layer saw {cancelled} cancels, the handlers saw {server.cancelled}"

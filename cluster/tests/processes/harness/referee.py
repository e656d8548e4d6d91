"""Judges a run from the fact files alone."""

from collections import Counter, defaultdict

from .facts import read

# How much too early a cancel may be, because the processes each have their own clock.
EARLY = 0.05
# The JSON-RPC error code for a call whose server has failed.
LOST_CALL = -32603
# How soon a connected client has to receive the answer.
AT_ONCE = 1.0
LEASE = 6.0
HEARTBEAT_INTERVAL = 2.0
# How long a request body that is relayed or restores its session may pause, and how long it takes to detect that.
BODY_IDLE = 30.0
BODY_IDLE_DETECTION = 3.0


class Limits:
    """Maximum delays."""

    def __init__(self, grace, backoff, strict):
        self.grace = grace
        # Every instance has to have sent a heartbeat created at least 2.15 s after the end of the grace.
        self.orphan = 3.0 + HEARTBEAT_INTERVAL
        # The sessions are written again first, and unknown ones get 503 for as long as a lease lasts.
        self.orphan_after_outage = LEASE + 3.0 + HEARTBEAT_INTERVAL
        # The killed instance's lease has to end first.
        self.error = LEASE + 2.0
        self.backoff = backoff
        self.effect = 0.1 if strict else 1.0


class Outages:
    """The times at which the directory was unavailable."""

    def __init__(self, facts):
        self._intervals = []
        for fact in facts:
            if fact.get("what") == "redis" and fact["event"] == "outage":
                self._intervals.append([fact["at"], float("inf")])
            elif fact.get("what") == "redis" and fact["event"] == "recovered" and self._intervals:
                self._intervals[-1][1] = fact["at"]

    def at(self, since, until):
        """Returns the outages that overlap an interval."""
        return [(begin, end) for begin, end in self._intervals if begin <= until and end >= since]


class Call:
    """The outcome of one call."""

    def __init__(self, facts):
        self.facts = facts
        asked = self.first_fact("asked")
        self.scenario, self.story, self.events = asked["scenario"], asked["story"], asked["events"]
        # Only the SDK itself knows its session and request ids.
        known = asked if asked["session"] else self.first_fact("started") or asked
        self.tag, self.session, self.id = asked["tag"], known["session"], known["id"]
        self.cuts, self.sdk = asked.get("cuts", 0), asked.get("sdk")

    def facts_of(self, event):
        return [fact for fact in self.facts if fact["event"] == event]

    def first_fact(self, event):
        return next(iter(self.facts_of(event)), None)

    def at(self, event):
        fact = self.first_fact(event)
        return fact and fact["at"]

    @property
    def ended(self):
        return self.first_fact("ended")

    @property
    def cancelled_at(self):
        return self.ended["at"] if self.ended and self.ended["how"] != "completed" else None

    @property
    def left_at(self):
        """When the client last disconnected."""
        cuts = self.facts_of("cut")
        return cuts[-1]["at"] if cuts else None


class Judge:
    """Judges calls by their stories and collects the faults."""

    def __init__(self, facts, limits):
        self.limits = limits
        self.faults = []
        self.worst = defaultdict(list)
        self._outages = Outages(facts)
        self._turned_away = [fact["at"] for fact in facts if fact.get("status") == 503 or fact["event"] == "turned away"]
        # When an instance is killed or stopped, its lease lapses, which counts as turning clients away.
        self._turned_away += [fact["at"] + LEASE + HEARTBEAT_INTERVAL for fact in facts if fact["event"] in ("killed", "signalled")]
        self._closed = {}
        for fact in facts:
            if fact["event"] == "closed":
                self._closed.setdefault(fact["session"], fact["at"])
        self.reasons = {(fact["session"], fact["id"].strip('"')): fact["outcome"] for fact in facts if fact["event"] == "outcome"}

    def judge(self, call):
        if len(call.facts_of("started")) > 1:
            self._fault("ran twice", call)
        for _ in call.facts_of("crossed"):
            self._fault("crossed", call)
        if any(fact["status"] in (404, 400, 403, 421) for fact in call.facts_of("refused")):
            self._fault("living session not found", call)
        getattr(self, f"_{call.story.replace('-', '_')}")(call)

    def _resumes(self, call):
        """The client always resumed in time."""
        if call.cancelled_at:
            self._fault("false cancel", call)
        self._answered(call)

    def _resumes_by_itself(self, call):
        """The client is an SDK. It resumed by itself after each cut, and deleted its session at the end."""
        if self._was_slow(call):
            # The machine is too busy for the result to mean anything.
            return self._fault("disconnected for longer than the grace", call)
        self._resumes(call)
        resumed = len(call.facts_of("resumed"))
        if resumed < call.cuts:
            self._fault(f"not resumed: {resumed} times of {call.cuts}", call)
        deleted, closed = call.at("deleted"), self._closed.get(call.session)
        if not deleted or not closed:
            return self._fault("session left open", call)
        if closed < deleted - EARLY:
            self._fault("session closed early", call)
        self._late("DELETE at the end", closed - deleted, self.limits.effect, call, "session left open")

    def _stay(self, call):
        """The client stayed connected."""
        self._resumes(call)
        if call.first_fact("cut off"):
            self._fault("attached call cut off", call)
        if call.ended and call.first_fact("answered"):
            late = call.at("answered") - call.ended["at"]
            self._late("answer", late, AT_ONCE, call)

    def _abandoned(self, call):
        """The client disconnected for good."""
        if not call.first_fact("started") or call.left_at is None:
            return self._fault("never began", call)
        due = call.left_at + self.limits.grace
        limit, what = due + self.limits.orphan, "orphan"
        for _, recovered in self._outages.at(call.left_at, due + EARLY):
            limit, what = max(limit, recovered + self.limits.grace + self.limits.orphan_after_outage), "orphan after an outage"
            due = max(due, recovered)
        # While an instance is turning clients away, no orphan is cancelled, because one of those clients might be its
        # own. Instances also report this when they have stalled, or when a client is waiting for its owner.
        for turned_away in self._turned_away:
            if call.left_at - self.limits.backoff <= turned_away <= limit:
                limit = max(limit, turned_away + self.limits.backoff + self.limits.orphan)
        if call.cancelled_at is None:
            return self._fault("missed cancel", call)
        if call.cancelled_at < due - EARLY:
            self._fault("false cancel", call)
        self._late(what, call.cancelled_at - due, limit - due, call, "missed cancel")
        reason = self.reasons.get((call.session, str(call.id)), "")
        if "Orphaned" not in reason:
            self._fault(f"cancelled as {reason or 'nothing'}", call)

    def _lost(self, call):
        """The owner was killed."""
        failed = call.first_fact("failed")
        if call.first_fact("answered") or not failed or failed["code"] != LOST_CALL:
            return self._fault("no error for a lost call", call)
        self._late("error", failed["at"] - call.at("resuming"), self.limits.error, call)

    def _given_up(self, call):
        """The owner was stopped, and another instance has claimed the session."""
        if call.first_fact("answered") or not call.first_fact("failed"):
            return self._fault("no error for a lost call", call)

    def _either(self, call):
        """The owner was stopped, and another instance may have claimed the session."""
        return self._answered(call) if call.first_fact("answered") else self._given_up(call)

    def _ended_by_client(self, call):
        """The client cancelled the call or deleted its session, at another instance."""
        sent = call.first_fact("sent")
        if not call.cancelled_at or not sent:
            return self._fault("missed cancel", call)
        self._late(sent["what"], call.cancelled_at - sent["at"], self.limits.effect, call)

    def _question(self, call):
        """The client answered the tool's request at another instance."""
        received, sent = call.first_fact("received"), call.first_fact("sent")
        if not received or not sent or received["word"] != f"word of {call.tag}":
            return self._fault("answer not received", call)
        self._late(sent["what"], received["at"] - sent["at"], self.limits.effect, call)
        self._answered(call)

    def _half(self, call):
        """The client sent half of the call, and stayed connected until that was answered or the client was cut off."""
        if call.first_fact("started"):
            self._fault("began with half a body", call)
        if call.first_fact("refused") and not call.first_fact("cut"):
            idle = call.at("refused") - call.at("asked")
            self._late("half a body", idle, BODY_IDLE + BODY_IDLE_DETECTION, call)
        elif not call.first_fact("cut"):
            self._fault("half a body without an end", call)

    def _was_slow(self, call):
        """Returns whether the client had made no attempt to resume before its grace ended."""
        if not call.cancelled_at:
            return False
        cut = max((fact["at"] for fact in call.facts_of("cut") if fact["at"] < call.cancelled_at), default=call.cancelled_at)
        tries = [*call.facts_of("resuming"), *call.facts_of("resumed")]
        tried = any(cut < fact["at"] < call.cancelled_at for fact in tries)
        return not tried and call.cancelled_at - cut > self.limits.grace - EARLY

    def _answered(self, call):
        answered = call.first_fact("answered")
        if not answered:
            return self._fault("lost answer", call)
        if not answered["right"]:
            self._fault("wrong answer", call)
        # rmcp repeats the event that a client names. No event may be missing or out of order.
        progress = answered["progress"]
        if progress != sorted(progress) or set(progress) != set(range(1, call.events + 1)):
            self._fault(f"events {progress}", call)

    def _late(self, what, seconds, limit, call, fault="late"):
        self.worst[call.scenario, what].append(seconds)
        if seconds > limit:
            self._fault(f"{fault}: {what} after {seconds:.3f} s", call)

    def _fault(self, what, call):
        start = call.facts[0]["at"]
        story = ", ".join(f"{_name(fact)} {fact['at'] - start:.2f}" for fact in call.facts)
        kind = what.split(":")[0] + (f" of {call.sdk}" if call.sdk else "")
        self.faults.append((kind, f"{what}: {call.tag}: {story}"))


def _name(fact):
    more = [str(fact[key]) for key in ("instance", "endpoint", "status", "how", "code") if fact.get(key) is not None]
    return " ".join([fact["event"], *more])


def judge(folder, grace, backoff, strict):
    """Prints the counts and the faults, and returns the kinds of faults."""
    facts = read(folder)
    by_tag = defaultdict(list)
    for fact in facts:
        if fact.get("tag"):
            by_tag[fact["tag"]].append(fact)
    calls = [Call(call_facts) for call_facts in by_tag.values() if any(fact["event"] == "asked" for fact in call_facts)]
    judge = Judge(facts, Limits(grace, backoff, strict))
    for call in calls:
        judge.judge(call)
    faults = [*judge.faults, *_of_sessions(facts), *_of_owners(facts), *_of_leases(facts), *_of_checks(facts)]
    faults += [("broken", f"broken: {fact}") for fact in facts if fact["event"] == "broken"]
    plans = {}
    for fact in facts:
        if fact["event"] == "plan":
            plans[fact["scenario"]] = fact
    _print(plans, calls, judge.worst, facts)
    for scenario, plan in plans.items():
        played = sum(call.scenario == scenario for call in calls)
        if played != plan["calls"]:
            faults.append(("not played", f"not played: {scenario}: {played} of {plan['calls']} calls"))
    if not plans:
        faults.append(("not played", "nothing was judged"))
    kinds = Counter()
    for kind, fault in faults:
        kinds[kind] += 1
        if kinds[kind] <= 12:
            print(f"WRONG {fault}")
    return kinds


def _of_sessions(facts):
    """Every instance can find a live session, and only one instance at a time owns it."""
    groups = defaultdict(set)
    for fact in facts:
        if fact["event"] == "poked" and fact["status"] in (400, 403, 404, 421):
            yield "living session not found", f"living session not found: {fact}"
        if fact["event"] == "whose":
            groups[fact["group"]].add(fact["name"])
            if fact["status"] == 404:
                yield "living session not found", f"living session not found: {fact}"
    for group, names in groups.items():
        if len(names) != 1 or None in names:
            yield "several owners", f"several owners, or none: {group}: {sorted(map(str, names))}"


def _of_owners(facts):
    """A call starts on the instance that was the last to open or restore its session. A live instance keeps its
    sessions."""
    opened, owns = {}, {}
    for fact in facts:
        event, session, instance = fact["event"], fact.get("session"), fact.get("instance")
        if event == "owns":
            owns |= dict.fromkeys(fact["sessions"], instance)
        elif event in ("ending", "killed"):
            ended = instance or fact["process"]
            owns = {session: owner for session, owner in owns.items() if owner != ended}
        elif event == "opened":
            opened[session] = fact
            if owns.get(session, instance) != instance:
                yield "taken from a living owner", f"taken from a living owner: {owns[session]}: {fact}"
        elif event == "started" and session in opened:
            last = opened[session]
            if last["instance"] != instance and fact["at"] > last["at"] + EARLY:
                yield "began elsewhere", f"began elsewhere: {fact} after {last}"


def _of_leases(facts):
    """No instance claims a stopped instance's session before that instance's lease has ended."""
    stops = [fact for fact in facts if fact["event"] == "stopped"]
    for fact in facts:
        if fact["event"] != "opened" or not fact["restored"]:
            continue
        for stop in stops:
            early = stop["at"] + LEASE - HEARTBEAT_INTERVAL - fact["at"]
            if fact["session"] in stop["sessions"] and stop["at"] < fact["at"] and early > EARLY:
                yield "claimed early", f"claimed early: by {early:.3f} s: {fact}"


def _of_checks(facts):
    """The attempts and their expected results."""
    for fact in facts:
        if fact["event"] == "check" and not fact["right"]:
            kind = fact.get("kind", "check")
            yield kind, f"{kind}: {fact}"


def _print(plans, calls, worst, facts):
    for scenario in plans:
        stories = Counter(call.story for call in calls if call.scenario == scenario)
        checks = sum(fact["event"] == "check" and fact.get("scenario") == scenario for fact in facts)
        counts = ", ".join(f"{number} {story}" for story, number in sorted(stories.items()))
        print(f"{scenario}: {counts}" + (f", {checks} checks" if checks else ""))
        for (measured, what), seconds in sorted(worst.items()):
            if measured == scenario:
                seconds.sort()
                print(f"    {what}: {len(seconds)} times, median {1000 * seconds[len(seconds) // 2]:.0f} ms, worst {1000 * seconds[-1]:.0f} ms")
        refused = Counter(
            fact["status"] for call in calls if call.scenario == scenario for fact in call.facts_of("refused")
        )
        if refused:
            print(f"    refused: {', '.join(f'{number} times {status}' for status, number in sorted(refused.items()))}")
    poked = Counter(fact["status"] for fact in facts if fact["event"] == "poked")
    if poked:
        print(f"living sessions probed: {', '.join(f'{number} times {status}' for status, number in sorted(poked.items()))}")
    whose = [fact for fact in facts if fact["event"] == "whose"]
    if whose:
        print(f"owners looked up: {len(whose)} times, in {len({fact['group'] for fact in whose})} groups")



"""Facts, written to files as lines of JSON. The referee reads nothing else."""

import asyncio
import json
import time


class Facts:
    """A folder with one file per instance, and one for the clients' facts and for what is done to processes."""

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._files = {}
        self._first_facts = {}
        self._waiting = {}
        self._followers = {}

    def note(self, event, **more):
        """Records a fact about a client, or something done to a process."""
        self._write("clients", {"event": event, "at": time.time(), **more})

    def take(self, instance, line):
        """Records a line from an instance."""
        fact = {**json.loads(line), "instance": instance}
        self._write(instance, fact)
        key = fact["event"], fact.get("tag")
        self._first_facts.setdefault(key, fact)
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(fact)
        if follower := self._followers.get(fact.get("tag")):
            follower(fact)

    def follow(self, tag, follower):
        """Forwards the instances' facts about a call to `follower`, which replaces any earlier one."""
        self._followers[tag] = follower

    async def until(self, event, tag, limit):
        """Returns the first such fact from an instance, or `None` after `limit`."""
        key = event, tag
        if key in self._first_facts:
            return self._first_facts[key]
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiting)
        done, _ = await asyncio.wait([waiting], timeout=limit)
        return waiting.result() if done else None

    def _write(self, name, fact):
        if name not in self._files:
            self._files[name] = open(self._folder / f"{name}.jsonl", "a")
        self._files[name].write(json.dumps(fact) + "\n")
        self._files[name].flush()


def read(folder):
    """Returns all facts, sorted by time."""
    facts = []
    for path in folder.glob("*.jsonl"):
        with open(path) as file:
            # A killed process may have left an incomplete line.
            facts += [json.loads(line) for line in file if line.endswith("\n")]
    return sorted(facts, key=lambda fact: fact["at"])

"""Facts, written to files as lines of JSON. The referee reads nothing else."""

import json
import time


class Facts:
    """A folder of facts. Each server writes its own file, and this program writes one for itself and the clients."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        self._file = open(folder / "run.jsonl", "a")

    def file(self, name):
        return self.folder / f"{name}.jsonl"

    def note(self, event, **more):
        self._file.write(json.dumps({"event": event, "at": time.time(), **more}) + "\n")
        self._file.flush()


class Tail:
    """Reads the new lines in a folder's files."""

    def __init__(self, folder):
        self._folder = folder
        self._read = {}

    def new(self):
        for path in sorted(self._folder.glob("*.jsonl")):
            with open(path) as file:
                file.seek(self._read.get(path, 0))
                # The rest of an incomplete line is read later.
                while (line := file.readline()).endswith("\n"):
                    self._read[path] = file.tell()
                    yield json.loads(line)


def read(folder):
    """Returns all facts, sorted by time."""
    return sorted(Tail(folder).new(), key=lambda fact: fact["at"])

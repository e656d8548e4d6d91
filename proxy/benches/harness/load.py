"""The clients: load/ does what is said here."""

import json
import select
import subprocess
from contextlib import contextmanager


def calls(programs, target, clients, seconds):
    """Calls a second, and the quantiles of the time of a call in µs."""
    words = [programs.load, "calls", target, clients, seconds]
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


class Clients:
    """Clients that go on until they are ended."""

    def __init__(self, words):
        self._words = [str(word) for word in words]
        self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def there(self):
        """What they say when all are there, without waiting for that."""
        return self.wait() if select.select([self._process.stdout], [], [], 0)[0] else None

    def wait(self):
        """What they say when all are there."""
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self._words)} failed")
        return json.loads(line)

    def go_on(self):
        """Has them do what comes next, and waits for that."""
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.wait()

    @property
    def pid(self):
        return self._process.pid

    def end(self):
        self._process.kill()
        self._process.communicate()


@contextmanager
def begun(programs, *words):
    """Clients that come while this runs, and are there until it ends."""
    clients = Clients([programs.load, *words])
    try:
        yield clients
    finally:
        clients.end()


@contextmanager
def staying(programs, *words):
    """Clients that are all there once this begins, and until it ends; and what they say then."""
    with begun(programs, *words) as clients:
        yield clients.wait()
